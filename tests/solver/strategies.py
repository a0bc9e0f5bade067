"""Chains for hypothesis: small whole numbers, so that ties, zeros and tight limits are common and sums are exact."""

from dataclasses import replace

from hypothesis import strategies as st

from rotor_solver import Chain, Option, Stage, min_bytes, simulate, store_all

TIMES = st.integers(0, 9).map(float)
SIZES = st.integers(0, 6)
SCRATCH = st.one_of(st.just(0), st.integers(0, 4), st.integers(0, 20))


@st.composite
def plain_chains(draw: st.DrawFn, max_stages: int = 4) -> Chain:
    """Chains with one option per stage, and nothing that the paper does not have but inputs that are released."""
    length = draw(st.integers(0, max_stages))

    def several(values: st.SearchStrategy[float], extra: int = 0) -> list[float]:
        return draw(st.lists(values, min_size=length + extra, max_size=length + extra))

    activation = several(SIZES, 1)
    forward_time = several(TIMES)
    released = [[draw(st.sampled_from((0, size))) for size in sizes] for sizes in (activation[:-1], activation[1:])]
    return Chain.from_arrays(
        forward_time=forward_time,
        backward_time=several(TIMES, 1),
        activation=activation,
        saved=[size + extra for size, extra in zip(activation[1:], several(SIZES), strict=True)],
        forward_temp=several(SCRATCH),
        backward_temp=several(SCRATCH, 1),
        input_released=released[0],
        output_released=released[1],
        skipped_output_time=[draw(_parts_of(time)) for time in forward_time],
    )


@st.composite
def rich_chains(draw: st.DrawFn, max_stages: int = 5) -> Chain:
    """Chains with everything that the model knows, views and backwards without a gradient of the input included."""
    stages: list[Stage] = []
    input_bytes = incoming = draw(SIZES)
    for _ in range(draw(st.integers(0, max_stages))):
        temps = st.one_of(SCRATCH, st.integers(-incoming, 0))
        option = st.builds(Option, TIMES, TIMES, SIZES, SCRATCH, temps, st.none() | temps)
        activation = draw(SIZES)
        options = tuple(draw(st.lists(option, min_size=1, max_size=3)))
        nograd_time = draw(st.none() | TIMES)
        forwards = [each.forward_time for each in options] + ([] if nograd_time is None else [nograd_time])
        stage = Stage(
            activation=activation,
            options=options,
            nograd_time=nograd_time,
            nograd_temp=draw(st.none() | SCRATCH),
            gradient=draw(st.one_of(st.just(0), SIZES, st.integers(0, 30))),
            input_released=draw(st.integers(0, incoming)),
            output_released=draw(st.integers(0, min(activation, *(each.saved for each in options)))),
            skipped_output_time=draw(_parts_of(min(forwards))),
        )
        stages.append(stage)
        incoming = stage.activation
    if len(stages) > 1 and draw(st.booleans()):  # what one backward leaves, an earlier stage's frees
        early, late = sorted(draw(st.lists(st.integers(0, len(stages) - 1), min_size=2, max_size=2, unique=True)))
        size = draw(SIZES)
        stages[early] = replace(stages[early], gradient=stages[early].gradient - size)
        stages[late] = replace(stages[late], gradient=stages[late].gradient + size)
    return Chain(tuple(stages), input_bytes, draw(TIMES), draw(SCRATCH), output_held=draw(st.booleans()))


@st.composite
def limited(draw: st.DrawFn, chains: st.SearchStrategy[Chain], *, below: int = 3) -> tuple[Chain, int]:
    """A chain, and a limit from `below` the least to more than storing everything takes."""
    chain = draw(chains)
    least, most = min_bytes(chain), simulate(chain, store_all(chain)).peak
    return chain, draw(st.integers(max(0, least - below), max(least, most) + 3))


def _parts_of(time: float) -> st.SearchStrategy[float]:
    return st.just(0.0) | st.integers(0, int(time)).map(float)


def unit_chain(length: int) -> Chain:
    """Every time is a second and every size a byte."""
    return Chain.from_arrays(
        [1.0] * length, [1.0] * (length + 1), [1] * (length + 1), [1] * length, [0] * length, [0] * (length + 1)
    )
