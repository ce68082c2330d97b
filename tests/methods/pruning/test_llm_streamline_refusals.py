"""Settings and replies of LLM-Streamline that are refused."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Message

from espalier.errors import EspalierError
from espalier.messages.records import STYPE, read
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.storage.blobs import sha256
from strategies.base.rounds import RunFailed
from tests.bench import Bench, summary
from tests.methods.pruning.llm_streamline_runs import LlmStreamlineRuns


class TestLlmStreamline(LlmStreamlineRuns):
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"pruning__ratio": 0.9},
                r"pruning.ratio = 0.9: of 4 blocks none would stay",
            ),
            ({"pruning__ratio": 0.75 + 1e-3}, "none would stay"),
            (
                {"llm_streamline__replacement": "none"},
                (
                    r"federation.rounds = 2: with llm-streamline.replacement = 'none' nothing is"
                    r" trained"
                ),
            ),
            (
                {"llm_streamline__steps": 200_000},
                (
                    r"llm-streamline\.steps = 200000: learning-rate x weight decay \(0\.001\) x"
                    r" steps = 2 is above 1"
                ),
            ),
        ],
    )
    def test_impossible_settings_are_refused_early(
        self, bench: Bench, changes: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(EspalierError, match=words):
            bench.run(**changes)
        assert not (bench.folder / "runs").exists()

    @pytest.mark.parametrize(
        ("server_round", "value", "words"),
        [
            (1, 1.5, "not finite, or beyond 1"),
            (1, np.nan, "not finite, or beyond 1"),
            (2, 1e9, "steps of"),
        ],
    )
    def test_implausible_reply_drops_its_sender(
        self, bench: Bench, server_round: int, value: float, words: str
    ) -> None:
        def spoil(request: Message, reply: Message) -> Message:
            asked = read(request.content).header
            if (asked.kind, asked.server_round) != ("train", server_round):
                return reply
            blobs = reply.content["blobs"]
            fields = reply.content["fields"]
            key = sorted(blobs)[0]
            tensors = {
                name: found.copy() for name, found in unpack_tensors(blobs[key].data).items()
            }
            next(iter(tensors.values())).flat[0] = value
            packed = pack_tensors(tensors)
            hashes = list(fields["blob_sha256"])
            hashes[hashes.index(sha256(blobs[key].data))] = sha256(packed)
            fields["blob_sha256"], blobs[key] = hashes, Array("", (), STYPE, packed)
            return reply

        grid = bench.grid()
        grid.tamper[1] = spoil
        clients = summary(bench.run(grid))["clients"]
        assert [client["status"] for client in clients] == [
            "completed",
            "dropped",
            "completed",
            "completed",
        ]
        assert words in clients[1]["reason"]

    def test_too_many_tokens_are_refused(self, bench: Bench) -> None:
        def claim(request: Message, reply: Message) -> Message:
            if "tokens" in reply.content["fields"]:
                reply.content["fields"]["tokens"] = 16_000_001
            return reply

        grid = bench.grid()
        grid.tamper = dict.fromkeys((0, 1, 2), claim)
        with pytest.raises(RunFailed, match="16000001 tokens, no client has more than 16000000"):
            bench.run(grid)

    @pytest.mark.parametrize(
        ("limit", "words"),
        [
            ({"max-steps": 2}, "max-steps = 2: llm-streamline.steps = 3"),
            (
                {"max-batch-tokens": 31},
                "max-batch-tokens = 31: llm-streamline.batch-size x data.sequence-length = 32",
            ),
            ({"max-rounds": 2}, "max-rounds = 2: rounds of the run = 3"),
        ],
    )
    def test_site_limits_apply_to_layer_training(
        self, bench: Bench, limit: dict[str, int], words: str
    ) -> None:
        """The site reports its limits at enrolment, before any work."""
        grid = bench.grid()
        for client, context in enumerate(grid.contexts.values()):
            more = limit if client == 1 else {}
            context.node_config |= {
                "site": f"site-{client}",
                "min-tokens": 30,
                "model-path": str(bench.model),
            } | more
        grid.simulated = False
        document = summary(bench.run(grid))
        assert words in document["refused"]["site-1"]
        assert [client["site"] for client in document["clients"]] == ["site-0", "site-2", "site-3"]

    def test_too_few_tokens_are_refused_by_the_site(self, bench: Bench) -> None:
        grid = bench.grid()
        for client, context in enumerate(grid.contexts.values()):
            context.node_config |= {
                "site": f"site-{client}",
                "min-tokens": 33 if client == 1 else 30,
            }
            context.node_config["model-path"] = str(bench.model)
        grid.simulated = False
        document = summary(bench.run(grid))
        assert (
            "min-tokens = 33: the answer would be computed from fewer tokens"
            in document["refused"]["site-1"]
        )
        assert [client["site"] for client in document["clients"]] == ["site-0", "site-2", "site-3"]
