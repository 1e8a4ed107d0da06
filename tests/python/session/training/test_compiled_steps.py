"""A compiled model in a session is one graph for all sizes, as it is without one: no breaks, no graph for each step."""

import pytest
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import evermoe
from support.flat_options import grouped
from support.habits import DATA, SAMPLES, WIDTH, Model, adamw, mean_loss

STEPS = 20


def build(kind):
    """Return a model, and the function of it and of tokens that computes the loss."""
    if kind == "transformers":
        from support.hub import elastic

        return elastic("qwen3"), lambda model, tokens: model(tokens)
    model = Model(use_reentrant=False if kind == "checkpointed" else None)
    if kind == "fp8":
        model.first = evermoe.MoE(WIDTH, 8, 6, top_k=2, fp8_dispatch=True)
    return model, mean_loss


def compiled_steps(write, kind, node, options):
    """Take steps of changing sizes with a model that is compiled with torch's defaults."""
    model, loss_of = build(kind)
    counter = CompileCounterWithBackend("aot_eager")
    model.compile(backend=counter)
    session = evermoe.Session(model, adamw(model), evermoe.ElasticSampler(SAMPLES, 12), **grouped(options, node=node))
    for step in session.steps(STEPS):
        with step as indices:
            step.backward(loss_of(model, DATA[indices[: 4 + step.number % 3]]))
        write("graphs", graphs=counter.frame_count, breaks=sum(counters["graph_break"].values()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "shards"), [("plain", False), ("checkpointed", True), ("fp8", False), ("transformers", True)]
)
def test_a_session_breaks_no_graph(start, kind, shards):
    """The second size makes torch compile for all sizes; nothing compiles after that."""
    if kind == "transformers":
        pytest.importorskip("transformers")
    found, logs = start(compiled_steps, "ab", kind, shard_optimizer=shards, hang_timeout=30.0)
    for name in "ab":
        rows = [(event["graphs"], event["breaks"]) for event in found[name] if event["event"] == "graphs"]
        assert rows == [(1, 0), *[(2, 0)] * (STEPS - 1)], logs[name][-3000:]
