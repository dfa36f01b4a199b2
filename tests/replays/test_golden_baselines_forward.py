"""Recorded forwards of LLaDA and Dream; sizes and masks are read from each folder."""

from forwards_full import check_forward, check_padded
from marks import over
from recorded import GOLDEN, arrays_in
from recorded_full import folders_in

FOLDER = GOLDEN / "baselines"
NAMES = [name for name in folders_in(FOLDER) if (FOLDER / name / "forward.npz").is_file()]


def test_folder_holds_recorded_networks():
    assert NAMES, f"{FOLDER} has no folders of full attention with a forward.npz"


@over(NAMES)
def test_forward(name):
    seen = check_forward(FOLDER / name, normed=True) | check_padded(FOLDER / name)
    assert seen == arrays_in(FOLDER / name / "forward.npz").keys()
