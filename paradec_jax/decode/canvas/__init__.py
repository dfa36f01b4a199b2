"""What decoders of canvases share: the canvas, the rules that reveal its positions, the spans that
a call reads.
"""

from paradec_jax.decode.canvas.blocks import AnyBlocks, BlockCanvas, BlockRead, read_states
from paradec_jax.decode.canvas.canvas import AnyCanvas, Canvas, Choice
from paradec_jax.decode.canvas.choose import BlockDecoder, DenoisingKnobs, quota, threshold_at
from paradec_jax.decode.canvas.spans import read_canvas, read_span, read_whole
from paradec_jax.decode.canvas.weigh import (
    COUNTED,
    SCORES,
    TAKEN_FROM,
    CanvasDecoder,
    CanvasKnobs,
    CanvasState,
    Filled,
    Weighed,
    by_chunks,
)
