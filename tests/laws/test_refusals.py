"""Bad input gets one clear sentence, before anything is compiled."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import stubs
from decoder_rows import BUDGET, SIZE
from decoders import EACH_CLASS, ROWS, tiny
from stubs import StubCausal, StubDenoiser, StubHead, tiny_params, tiny_request
from tracing import nothing_is_traced

from experiments import replicas
from experiments.decoders import residual_veto
from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode.causal import lookahead
from paradec_jax.decode.machine import knobs


@EACH_CLASS
def test_what_cannot_work_is_refused_at_once(name):
    row = ROWS[name]
    request, knobs = tiny_request(BUDGET), row.values()
    drivers = {
        "run": decode.run,
        "trace": functools.partial(decode.trace, n=2),
        "rollout": functools.partial(decode.rollout, n=2),
        "stream": lambda *given: next(decode.stream(*given)),
    }
    values = {"temperature": -1.0, "top_p": 0.0, "top_k": -1, "min_p": 2.0}
    with nothing_is_traced(row.kind):
        for drive_it in drivers.values():
            with pytest.raises(ValueError, match=r"bind\(network, size\)"):
                drive_it(row.kind(**row.options), row.params, request, knobs)
            with pytest.raises(ValueError, match="prompt of 5 tokens"):
                drive_it(row.decoder(size=5), row.params, request, knobs)
            if not row.kind.windowed:
                with pytest.raises(ValueError, match=r"65 .* 64 positions"):
                    drive_it(row.decoder(size=65), row.params, request, knobs)
            for field, value in values.items():
                wrong = dataclasses.replace(knobs, **{field: value})
                with pytest.raises(ValueError, match=field):
                    drive_it(row.decoder(), row.params, request, wrong)


def run(decoder, prompts=((1,),), params=None, recorded=None, **knobs):
    """A run that must be refused."""
    request = tiny_request(2, prompts=prompts, recorded=recorded)
    return decode.run(decoder, params, request, decoder.Knobs(**knobs))


CAUSAL, CANVAS, BLOCKS = StubCausal(), StubDenoiser(), StubDenoiser(block=4)
OWN, NEXT = (TokenSpec(mask=CANVAS.mask, alignment=alignment) for alignment in ("own", "next"))
NO_MASK, BEYOND = TokenSpec(alignment="own"), TokenSpec(mask=11, alignment="own")
RIGHT, OTHER, TWO = (
    StubHead(BLOCKS),
    StubHead(StubDenoiser(block=2)),
    {"network": None, "head": None},
)
HOLES = decode.make_request([[1, 0]], given=[[True, False]], max_new_tokens=1)
BLOCKS_ALONE = "decodes networks of visibility 'block', but this one's is"
RECURRENT_ALONE = "are for networks of recurrent depth"
REFUSED = {
    "run(AutoRegressive(CAUSAL, SIZE), ((1,), ()))": "continues a prompt, so every row needs at least one token",
    "decode.run(AutoRegressive(CAUSAL, SIZE), None, HOLES)": "appends tokens, so it cannot fill the holes",
    "AutoRegressive().bind(tiny_blocks(), 16, OWN)": "visibility 'causal', but this one's is 'block'",
    "decode.run(ROWS['jacobi'].decoder(), None, tiny_request(2), Static.Knobs())": (
        r"Jacobi takes knobs of type Jacobi\.Knobs .*, not LatentKnobs"
    ),
    "rollout(ROWS['wavefront'].decoder(), None, tiny_request(2), n=4, segment=3)": "segment",
    "decode.run(ROWS['jacobi'].decoder(), None, tiny_request(2), max_steps=5, every=2)": (
        "every must divide max_steps = 5, but it is 2"
    ),
    "serve(AutoRegressive(), None, tiny_request(2))": "call bind",
    "serve(ROWS['wavefront'].decoder(), None, tiny_request(2), rows=0)": "rows must be at least 1, not 0",
    "serve(ROWS['wavefront'].decoder(), None, tiny_request(2), every=0)": "every must be at least 1, not 0",
    # Recurrent decoders
    "Adaptive(criterion='mood')": "criterion must be one of",
    "SelfSpeculative(lookahead=0)": "lookahead",
    "SelfSpeculative(draft_recurrence=0)": "draft_recurrence",
    "SelfSpeculative(continuous=True, lookahead=2)": "continuous",
    "Wavefront(inner_recurrence=0)": "inner_recurrence",
    "Wavefront(window=0)": "window",
    "Wavefront(headway=0)": "headway",
    "Wavefront(noise_mixing='shaken')": "noise_mixing",
    "as_arrays(Wavefront.Knobs(momentum=np.zeros((2, 2))))": "momentum must be a number or",
    "as_arrays(Wavefront.Knobs(noise=np.zeros(0)))": r"noise must be .* not of shape \(0,\)",
    "SoftWavefront(relaxation='mood')": "relaxation must be one of straight_through, soft",
    "SoftWavefront(relaxation='soft')": "needs greedy=True",
    "SoftWavefront.Knobs(gate_temperature=0.0).check()": "gate_temperature must be above 0",
    "SoftWavefront.Knobs(candidate_temperature=-1.0).check()": "candidate_temperature must be above 0",
    "ReleasedWavefront(rule='mood')": "rule must be one of latent-diff",
    "ReleasedWavefront(window=2, headway=3)": "headway 3 must not exceed the window 2",
    "ReleasedWavefront(noise_schedule='shaken')": "noise_schedule",
    # Causal ones
    "PromptLookup(max_ngram=0)": "max_ngram must be at least 1, not 0",
    "PromptLookup(max_ngram=2)": "min_ngram must be at most 2, not 3",
    "PromptLookup(num_pred=0)": "num_pred must be at least 1, not 0",
    "ReleasedPromptLookup(dummy=-1)": "dummy must be a token id, not -1",
    "Lookahead(level=2)": "level must be at least 3, not 2",
    "Lookahead(window=0)": "window must be at least 1, not 0",
    "Lookahead(guesses=0)": "guesses must be at least 1, not 0",
    "Jacobi(block=1)": "block must be at least 2, not 1",
    "Jacobi(block=8.5)": "block must be a whole number, not 8.5",
    "Lookahead(guesses='x')": "guesses must be a whole number, not 'x'",
    "Jacobi(CAUSAL, 65, block=65)": "block must be at most 64, not 65",
    "AutoRegressive(top_p_rule='x')": "top_p_rule must be one of drop, keep,",
    "run(AutoRegressive(CAUSAL, 64.5))": "size must be a whole number, not 64.5",
    "Jacobi(pool=-1)": "pool must be at least 0, not -1",
    "Jacobi(pool=2, candidates=1)": "2 with a pool, not 1",
    "Jacobi(blocks=0)": "blocks must be at least 1, not 0",
    "Jacobi(running=True, blocks=2)": "a running window has no blocks",
    "Jacobi(block=4).bind(tiny_blocks(), 16, OWN)": "visibility 'causal', but this one's is 'block'",
    "run(Jacobi(CAUSAL, SIZE, recurrence=2))": RECURRENT_ALONE,
    "run(Jacobi(CAUSAL, SIZE, prefill_recurrence=1))": RECURRENT_ALONE,
    "run(Jacobi(CAUSAL, SIZE, blocks=2), spawn=1.5)": "spawn must be between 0 and 1, not 1.5",
    "run(Jacobi(CAUSAL, SIZE, blocks=2), spawn=-0.1)": "spawn must be between 0 and 1, not -0.1",
    "run(Jacobi(CAUSAL, SIZE), spawn=0.5)": "spawn needs blocks of at least 2, not 1",
    "ReleasedJacobi(block=0)": "block must be at least 1, not 0",
    "ReleasedJacobi(greedy=False)": "ReleasedJacobi is greedy",
    "ReleasedJacobi(log_probs=True)": "keeps no log-probabilities",
    "ReleasedRunningWindow(block=1)": "block must be at least 2",
    "ReleasedMultiBlock(variant='dev')": "variant must be one of main, tail, plain, not",
    "ReleasedMultiBlock(pool=-1)": "pool must be at least 0, not -1",
    # Canvases
    "SemiAutoregressive().bind(CAUSAL, SIZE, OWN)": "of visibility 'full', but this one's is 'causal'",
    "SemiAutoregressive(cache='dual').bind(tiny_denoiser(), SIZE, OWN)": (
        "cache dual needs a network with one, which DenoiserNetwork has not"
    ),
    "SemiAutoregressive(rule='dynamic')": "rule must be one of static, rounded, .*, not 'dynamic'",
    "SemiAutoregressive(order='mood')": "order must be one of confidence, .*, random, not 'mood'",
    "SemiAutoregressive(cache='mood')": "cache must be one of none, prefix, dual, not 'mood'",
    "SemiAutoregressive(rule='entropy')": "rule entropy needs order entropy, not confidence",
    "SemiAutoregressive(rule='bound', order='random')": "rule bound needs order entropy, not random",
    "SemiAutoregressive(length=0)": "length must be at least 1, not 0",
    "run(full(NO_MASK))": "mask token, but the checkpoint's token spec has none",
    "run(full(NEXT), ((1,), ()))": (
        "row 1 does not begin with a given token, and logits of alignment 'next'"
    ),
    "run(full(), renew=2)": "renew needs cache prefix or dual, not none",
    "run(full(), steps=2)": "steps needs rule static or rounded or grid or capped, not threshold",
    "run(full(), epsilon=0.1)": "epsilon needs rule grid, not threshold",
    "run(full(rule='static'), threshold=0.5)": "threshold needs rule .*threshold or capped, not static",
    "run(full(order='random'), spread=0.5)": "spread needs order confidence or .*, not random",
    "run(full(cache='dual'), renew=0)": "renew must be at least 1, not 0",
    "Wino(rule='static')": "rule must be one of threshold, not 'static'",
    "Wino().bind(CANVAS, SIZE, NEXT)": "networks of alignment 'own', but this one's is 'next'",
    "run(full(kind=Wino), steps=2)": "steps needs rule static .*, not threshold",
    "run(full(kind=Wino), back=1.5)": "back must be between 0 and 1, not 1.5",
    "Prophet(rule='threshold')": "rule must be one of static, rounded, grid, capped, not 'threshold'",
    "run(full(kind=Prophet), early=-1.0)": "early must be at least 0, not -1.0",
    "run(full(kind=Prophet), answer=0)": "answer must be at least 1, not 0",
    "Planned(length=4)": "Planned ranks the whole canvas, so length must be None, not 4",
    "SpeculativeDenoising(tries=0)": "tries must be at least 1, not 0",
    "SpeculativeDenoising(rule='static')": "rule must be one of single, not 'static'",
    "run(full(kind=SpeculativeDenoising), steps=2)": "steps needs rule static .*, not single",
    "Masked(order='mood')": "order must be one of random, single, confidence, .*'mood'",
    "Masked(chunk=0)": "chunk must be at least 1, not 0",
    "Masked(confidence='raw')": "confidence needs order confidence or margin or entropy, not random",
    "Masked().bind(tiny_blocks(), 16, OWN)": "networks of visibility 'full', but this one's is 'block'",
    "SoftMasked(relaxation='mood')": "relaxation must be one of straight_through, soft",
    "Strided(width=0)": "width must be at least 1, not 0",
    "Strided(CANVAS, 80, width=65)": "width must be at most 64, not 65",
    "Strided(width=8, stride=9)": "stride must be from 1 to the width 8, not 9",
    "run(Masked(CANVAS, SIZE, OWN), steps=0)": "steps must be at least 1, not 0",
    "run(Masked(CANVAS, SIZE, OWN), grid=np.array([1.0, 0.5, 0.5]))": (
        "grid must be times that fall from 1 to above 0"
    ),
    "run(Masked(CANVAS, SIZE, OWN), grid=np.array([1.0, 0.5]), steps=2)": (
        "2 times has as many steps, so steps must be None"
    ),
    "run(Masked(CANVAS, SIZE, OWN, order='single'), steps=2)": (
        "steps needs order random or .* or entropy, not single"
    ),
    "run(Masked(CANVAS, SIZE, OWN, order='single'), grid='cosine')": (
        "grid needs order random or .*, not single"
    ),
    "run(Masked(CANVAS, SIZE, NO_MASK))": "mask token, but the checkpoint's token spec has none",
    "run(Masked(CANVAS, SIZE, BEYOND))": (
        "the mask token must be an id below the 11 of the vocabulary, not 11"
    ),
    "run(Masked(CANVAS, SIZE, OWN), ([3], [4, 10]))": (
        "row 1 gives the mask token 10 at position 1: leave a hole there"
    ),
    "ReleasedMasked(program='mood')": "program must be one of mdlm, sdtt, not 'mood'",
    "ReleasedMasked(program='sdtt')": "of sdtt must be one of ancestral, analytic, not 'cached'",
    "ReleasedMasked(steps=0)": "steps must be at least 1, not 0",
    "ReleasedMasked(log_probs=True)": "ReleasedMasked keeps no log-probabilities",
    "ReleasedStrided(stride=9, width=8)": "stride at most the width, not 8 and 9",
    # Blocks
    "BlockDenoising(rule='mood')": "rule must be one of static, dynamic, .*, not 'mood'",
    "BlockDenoising().bind(CAUSAL, SIZE, OWN)": f"{BLOCKS_ALONE} 'causal'",
    "BlockDenoising().bind(CANVAS, SIZE, OWN)": f"{BLOCKS_ALONE} 'full'",
    "run(BlockDenoising(CAUSAL, SIZE, OWN, rule='static'))": f"{BLOCKS_ALONE} 'causal'",
    "run(static(), steps=5)": "steps must be at most the block's 4, not 5",
    "run(static(), steps=0)": "steps must be at least 1, not 0",
    "run(static(), threshold=0.9)": "threshold needs rule dynamic or threshold, not static",
    "run(static(), entropy=0.3)": "entropy needs rule entropy or certain, not static",
    "run(static(rule='entropy'), steps=2)": "steps needs rule static or .* or random, not entropy",
    "run(static(rule='factor'), factor=-1.0)": "factor must be at least 0, not -1.0",
    "run(static(rule='dynamic'), threshold=np.zeros((2, 2)))": (
        r"threshold must be a number or a schedule \[K\]"
    ),
    "run(static(NO_MASK))": "the checkpoint's token spec has none",
    "run(static(NEXT), ((1,), ()))": (
        "row 1 does not begin with a given token, and logits of alignment 'next'"
    ),
    "run(static(), ((1, 10),))": "row 0 gives the mask token 10 at position 1",
    "SoftBlock(relaxation='mood')": "relaxation must be one of straight_through, soft",
    "SoftBlock(rule='static')": "rule must be one of dynamic, threshold, not 'static'",
    "SoftBlock.Knobs(token_temperature=0.0).check()": "token_temperature must be above 0",
    "SoftBlock.Knobs(gate_temperature=-1.0).check()": "gate_temperature must be above 0",
    "run(SoftBlock(BLOCKS, SIZE, OWN), threshold=(0.5, -1.0))": "threshold must be at least 0",
    "run(SoftBlock(BLOCKS, SIZE, OWN), recorded=RecordedDraws(jnp.zeros(SIZE)))": (
        r"SoftBlock draws by its keys, so recorded\.uniforms must be None"
    ),
    "ReleasedDenoising(program='mood')": "program must be one of generate, .*, not 'mood'",
    "ReleasedDenoising(rule='random')": "rule must be one of static, .*entropy, not 'random'",
    "ReleasedDenoising(log_probs=True)": "ReleasedDenoising keeps no log-probabilities",
    # Residual heads
    "Residual(head='none')": "head must be a residual head's network, or 'zero', not 'none'",
    "Residual(head_steps=0)": "head_steps must be at least 1, not 0",
    "Residual(mix='both')": "mix must be one of sum, none, not 'both'",
    "Residual(head_rule='factor')": "head_rule must be one of static, dynamic, not 'factor'",
    "Residual(rule='static', head_rule='dynamic')": "must be dynamic or threshold, not 'static'",
    "Residual(head='zero', mix='none')": "mix 'none' takes the head's answer .* not be 'zero'",
    "run(headed(RIGHT), params=TWO, head_threshold=-1.0)": "head_threshold must be at least 0",
    "run(headed(RIGHT), params=TWO, enough=0)": "enough must be at least 1, not 0",
    "run(headed(RIGHT), params=TWO, steps=5)": "steps must be at most the block's 4, not 5",
    "run(headed(None), params=TWO)": r"bind\(network, size\)",
    "run(headed(OTHER), params=TWO)": (
        "corrects blocks of 2, not of 4: it is another network's or another length's"
    ),
    "ResidualVeto(judge='mood')": "judge must be one of change, confidence, not 'mood'",
    "run(headed(RIGHT, ResidualVeto, judge='confidence'), params=TWO, delta=1.0)": "delta needs judge change",
    "run(headed(RIGHT, ResidualVeto), params=TWO, factor=1.0)": "factor needs rule factor, not dynamic",
    "MultiBlock(flight=0)": "flight must be at least 1, not 0",
    "MultiBlock().bind(CAUSAL, SIZE, OWN)": "of visibility 'block' or 'full', .* 'causal'",
    "run(MultiBlock(BLOCKS, SIZE, OWN), edit=0.5)": "edit needs edits True, not False",
    "run(MultiBlock(BLOCKS, SIZE, OWN), admit=1.5)": "admit must be between 0 and 1, not 1.5",
    "SelfVerified(route='mood')": "route must be one of span, score, not 'mood'",
    "run(SelfVerified(BLOCKS, SIZE, OWN), price=1.0)": "price needs route score, not span",
    "ResidualSpeculative(candidates=1)": "candidates must be at least 2, .* it is BlockDenoising",
    "ResidualSpeculative(fuse_store=False)": "ride needs fuse_store",
    "ResidualSpeculative(rule='mood')": "rule must be one of static, .*, not 'mood'",
    "ResidualSpeculative(head='one')": "or 'zero', not 'one'",
    "ResidualSpeculative(head=RIGHT).bind(CANVAS, SIZE, OWN)": f"{BLOCKS_ALONE} 'full'",
    "ReleasedSpeculative(candidates=0)": "candidates must be at least 1, not 0",
    "ReleasedSpeculative(log_probs=True)": "ReleasedSpeculative keeps no log-probabilities",
    "LossyPositionWise(candidates=1)": "candidates must be at least 2, not 1",
    "LossyPositionWise(log_probs=True)": "LossyPositionWise keeps no log-probabilities",
}


def static(spec: TokenSpec = OWN, rule: str = "static") -> decode.BlockDenoising:
    return decode.BlockDenoising(BLOCKS, SIZE, spec, rule=rule)


def full(spec: TokenSpec = OWN, kind: type = decode.SemiAutoregressive, **options):
    return kind(CANVAS, SIZE, spec, **options)


def headed(head, kind: type = decode.Residual, **options):
    return kind(BLOCKS, SIZE, OWN, head=head, **options)


NAMES = {"np": np, "jnp": jnp}
for module in (stubs, knobs, lookahead, replicas, residual_veto, decode):
    NAMES |= {name: value for name, value in vars(module).items() if name[0] != "_"}


@pytest.mark.parametrize("call", REFUSED)
def test_bad_input_is_named(call):
    with pytest.raises(ValueError, match=REFUSED[call]):
        eval(call, NAMES | globals())


def test_a_wave_too_narrow_for_its_schedule_is_refused():
    """Under "fixed" a wave that is full before anything is due would wait for ever."""
    request = tiny_request(4)
    narrow = tiny(replicas.ReleasedWavefront, "shared", rule="fixed", inner_recurrence=2, window=4)
    needed = narrow.patience + 3
    narrow = dataclasses.replace(narrow, window=needed - 1)
    with pytest.raises(ValueError, match=f"window must be at least {needed}, not {needed - 1}"):
        decode.run(narrow, tiny_params(), request, narrow.Knobs())
    wide = dataclasses.replace(narrow, window=needed)
    result = decode.run(wide, tiny_params(), request, wide.Knobs(noise=0.0), max_steps=100)
    assert [len(ids) for ids in result.completions()] == [4] * 3
