"""Messages that only move bytes are answered without importing torch.

Flower starts a process for every message, and the import takes seconds.
"""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import Message

from espalier.messages.records import read
from tests.bench import EVALUATED, Bench
from tests.tiny_model import save_tiny_llama

ANSWER = """
import pickle, sys
from pathlib import Path
for library in ("torch", "numba", "transformers"):
    sys.modules[library] = None  # importing it raises
from flwr.app import Context, RecordDict
from client_app.app import app
from client_app.simulation import playing_a_node
from espalier.flower.shared_nodes import play_task
from espalier.messages.records import address, read
play_task()
asked = pickle.loads(Path(sys.argv[1]).read_bytes())
message = address(asked["request"], 1, 60.0)
message.metadata.__dict__["_message_id"] = "one"
with playing_a_node():
    reply = read(app(message, Context(1, 1, asked["node"], RecordDict(), asked["run"])).content)
assert reply == asked["reply"], (reply.header, reply.fields)
"""
"""Program that answers an already answered request again and compares the replies."""


@pytest.mark.parametrize("method", ["fedprllm", "fedspallm"])
def test_masks_are_exchanged_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    # The minimum for real sites is larger than the texts of the bench.
    monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
    bench = Bench(tmp_path, method, EVALUATED | {"pruning.sparsity": 0.5}, num_clients=2)
    answered = set[str]()
    bench.model = save_tiny_llama(tmp_path / "deep", blocks=8)
    grid = bench.grid()
    node = next(
        dict(context.node_config)
        for context in grid.contexts.values()
        if context.node_config["partition-id"] == 0
    )

    def answer_anew(message: Message, reply: Message) -> Message:
        request = read(message.content)
        if (kind := request.header.kind) in ("fetch", "push") and kind not in answered:
            asked = tmp_path / "asked"
            asked.write_bytes(
                pickle.dumps(
                    {
                        "request": request,
                        "reply": read(reply.content),
                        "node": node,
                        "run": bench.config(),
                    }
                )
            )
            done = subprocess.run(
                [sys.executable, "-c", ANSWER, str(asked)], capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            answered.add(kind)
        return reply

    grid.tamper = {0: answer_anew}
    bench.run(grid)
    assert answered == {"fetch", "push"}


def test_a_node_that_waits_holds_no_torch() -> None:
    """The process that waits for messages would hold 180 MB more at every site."""
    program = "import sys, client_app.node.warm_node; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3]).returncode
        == 0
    )
