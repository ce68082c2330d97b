"""SliceGPT: promises of every method, and bases compared with pooled texts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, Message
from torch import Tensor
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.contract import check
from espalier.messages.contracts import contract_for
from espalier.messages.message import Header, MessageBody
from espalier.messages.records import STYPE, read
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.settings.keys import changed
from espalier.settings.run import parse
from espalier.storage.blobs import sha256
from tests.bench import Bench, home, model_files, summary
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import Promises
from tests.methods.pruning.test_flap import all_samples

WIDTH = 16
KEPT = 12
SMALL = {
    "slicegpt.width-pruning-ratio": 0.25,
    "slicegpt.multiple": 4,
    "federation.max-update-ratio": 1e6,
}
"""Settings without limits: moments of so few tokens differ more than those of real clients."""
PLACES = [f"block-{index:04d}-{part}" for index in range(2) for part in ("attn", "mlp")] + ["head"]
UPPER = np.triu_indices(WIDTH)
PUBLIC = {
    "slicegpt.covariances": "public",
    "public.samples": 10_000,
}


@torch.no_grad()
def moments_by_hand(bench: Bench, samples: Tensor) -> list[Tensor]:
    """Return the second moments of the norms' outputs in the dense model, without their scale.

    They are means over tokens, shape (width, width), float64.
    """
    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32).eval()
    found = list[Tensor]()

    def keep(norm: Any, _: Any, output: Tensor) -> None:
        signals = (output / norm.weight).flatten(0, -2).double()
        found.append(signals.T @ signals / len(signals))

    for block in model.model.layers:
        block.input_layernorm.register_forward_hook(keep)
        block.post_attention_layernorm.register_forward_hook(keep)
    model.model.norm.register_forward_hook(keep)
    model(input_ids=samples, use_cache=False)
    return found


def projections(folder: Path) -> list[Tensor]:
    """Return the projections onto the spans of a run's bases, shape (width, width), float64.

    A projection does not depend on the choice of basis vectors within the span.
    """
    state = json.loads((folder / "checkpoint" / "state.json").read_text())["state"]
    blobs = [
        (folder / "checkpoint" / "blobs" / f"{name}.blob").read_bytes() for name in state["bases"]
    ]
    found = [torch.from_numpy(unpack_tensors(blob)["basis"].copy()).double() for blob in blobs]
    return [basis @ basis.T for basis in found]


def principal(moments: Tensor, kept: int = KEPT) -> Tensor:
    """Return the projection onto the strongest directions, computed with NumPy."""
    values, vectors = np.linalg.eigh(moments.numpy())
    strongest = vectors[:, np.argsort(-values)[:kept]]
    return torch.from_numpy(strongest @ strongest.T)


def changing(
    change: Callable[[dict[str, np.ndarray]], None], place: str = "block-0000-attn"
) -> Any:
    """Return a tamper that changes the moments of one place and updates the blob's hash."""

    def tamper(request: Message, reply: Message) -> Message:
        if read(request.content).header.kind == "train":
            tensors = unpack_tensors(reply.content["blobs"][place].data)
            tensors = {name: value.copy() for name, value in tensors.items()}
            change(tensors)
            blob = pack_tensors(tensors)
            reply.content["blobs"][place] = Array("", (), STYPE, blob)
            hashes = list(reply.content["fields"]["blob_sha256"])
            hashes[PLACES.index(place)] = sha256(blob)
            reply.content["fields"]["blob_sha256"] = hashes
        return reply

    return tamper


class TestSliceGpt(Promises):
    """Federations with one round that keeps 12 of 16 dimensions of the residual stream."""

    method = "slicegpt"
    settings: ClassVar[dict[str, Any]] = SMALL
    last_round = 1
    cuts_samples = "calibration_samples"

    @pytest.fixture
    def pointed(self, bench: Bench) -> Bench:
        """Let the centralized baseline find the clients' texts too."""
        bench.settings = bench.settings | {
            "data.source": "files",
            "data.path": f"{bench.folder}/text-{{client}}.txt",
        }
        return bench

    def other_orders(self, order: MessageBody) -> list[MessageBody]:
        """Return no orders: an order of SliceGPT has no content that could differ."""
        return []

    def test_bases_equal_one_party_with_all_windows(self, pointed: Bench) -> None:
        folder = pointed.run(evaluation__centralized="auto")
        expected = [
            principal(moments) for moments in moments_by_hand(pointed, all_samples(pointed))
        ]
        for found, wanted in zip(projections(folder), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
        (metric,) = summary(folder)["metrics"]
        assert metric["values"]["centralized"] == pytest.approx(
            metric["values"]["federated"], rel=1e-3
        )
        assert metric["values"]["dense"] != pytest.approx(metric["values"]["federated"], rel=1e-3)

    @pytest.mark.parametrize("weights", ["samples", "equal"])
    def test_clients_weigh_by_windows_if_told(self, pointed: Bench, weights: str) -> None:
        changes: dict[str, Any] = {"federation__client_weights": weights}
        if weights == "samples":
            changes["federation__max_weight_ratio"] = 1e6
        grid = pointed.grid(**changes)
        next(iter(grid.contexts.values())).node_config["num-samples"] = 6
        folder = pointed.run(grid, **changes)
        told = [
            read(reply.content).fields
            for _, reply in grid.received
            if read(reply.content).header.kind == "train"
        ]
        assert sorted(fields["samples"] for fields in told) == (
            [2, 2, 2, 6] if weights == "samples" else [0, 0, 0, 0]
        )
        sent: dict[int, list[Tensor]] = {}
        for client, reply in grid.received:
            body = read(reply.content)
            for blob in (body.blobs[key] for key in sorted(body.blobs)):
                full = np.zeros((WIDTH, WIDTH))
                full[UPPER] = unpack_tensors(blob)["moments"]
                sent.setdefault(client, []).append(torch.from_numpy(full + np.triu(full, 1).T))
        share = {0: 6, 1: 2, 2: 2, 3: 2} if weights == "samples" else dict.fromkeys(range(4), 1)
        for place, found in enumerate(projections(folder)):
            mean = sum(share[client] * moments[place] for client, moments in sent.items()) / sum(
                share.values()
            )
            torch.testing.assert_close(found, principal(mean), rtol=0, atol=1e-5)

    def test_client_moments_are_those_of_its_windows(self, plain: Uninterrupted) -> None:
        changes = {
            "data__source": "files",
            "data__path": f"{plain.bench.folder}/text-{{client}}.txt",
        }
        samples = all_samples(plain.bench, **changes).chunk(4)
        seen = 0
        by_hand = [moments_by_hand(plain.bench, own) for own in samples]
        for client, reply in plain.received:
            for key, blob in read(reply.content).blobs.items():
                expected = by_hand[client][PLACES.index(key)].numpy()[UPPER]
                np.testing.assert_allclose(
                    unpack_tensors(blob)["moments"], expected, rtol=1e-4, atol=1e-5
                )
                seen += 1
        assert seen == 4 * len(PLACES)

    def test_the_report_and_the_files_agree(self, plain: Uninterrupted) -> None:
        """Each block has 7 matrices with 12 of 16 columns, and two more of 12 x 12."""
        document = summary(plain.folder)
        report = summary(plain.folder)["report"]
        built = AutoModelForCausalLM.from_pretrained(plain.folder / "model")
        counted = sum(parameter.numel() for parameter in built.parameters())
        base = OpenedModel(plain.bench.model)
        assert (
            report["parameters"]
            == OpenedModel(plain.folder / "model").plan.num_parameters
            == counted
        )
        assert report["remaining_fraction"] == pytest.approx(counted / base.plan.num_parameters)
        assert (report["width"], report["width_of_the_base"], report["form"]) == (
            KEPT,
            WIDTH,
            "compact",
        )
        assert len(report["explained_variance"]) == len(PLACES)
        assert all(0.5 < kept <= 1 for kept in report["explained_variance"])
        before = 16 * (16 + 8 + 8 + 16 + 3 * 24)
        assert document["sparsity"]["achieved"] == pytest.approx(
            1 - (before * 12 / 16 + 2 * 12 * 12) / before
        )

    def test_rotated_alone_it_is_the_dense_model(self, bench: Bench) -> None:
        """The tolerance is that of bfloat16, the dtype of the files."""
        (metric,) = summary(bench.run(slicegpt__width_pruning_ratio=0.0))["metrics"]
        assert metric["values"]["federated"] == pytest.approx(metric["values"]["dense"], rel=0.02)

    # ----- public text ----------------------------------------------------------------------------

    def test_with_public_text_clients_send_nothing(self, bench: Bench, tmp_path: Path) -> None:
        text = tmp_path / "slice.txt"
        text.write_text(bench.public.read_text()[::-1])
        bench.settings = bench.settings | PUBLIC | {"public.text": str(text)}
        grid = bench.grid(evaluation__local_baseline=True, evaluation__own_text=True)
        folder = bench.run(grid, evaluation__local_baseline=True, evaluation__own_text=True)
        replies = [read(reply.content) for client, reply in grid.received if client == 0]
        told = [reply.fields for reply in replies if reply.header.kind == "train"]
        assert [(fields["samples"], fields["blob_sha256"]) for fields in told] == [(0, [])]
        assert not any(reply.blobs for reply in replies)
        assert "local_baseline" in [reply.header.kind for reply in replies]
        tokens = torch.tensor(OpenedModel(bench.model).encode(text.read_text()))
        samples = tokens[: len(tokens) // 16 * 16].view(-1, 16)
        for found, moments in zip(
            projections(folder), moments_by_hand(bench, samples), strict=True
        ):
            torch.testing.assert_close(found, principal(moments), rtol=0, atol=1e-3)
        document = summary(folder)
        public = next(metric for metric in document["metrics"] if metric["dataset"] == "public")
        assert public["values"]["local_baseline"] != public["values"]["federated"]
        assert {client["status"] for client in document["clients"]} == {"completed"}

        again = bench.killed(lambda header: header.kind == "train" and header.client == 2)
        assert model_files(bench.run(bench.grid(), resume_from=str(again))) == model_files(folder)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"public__text": "/nowhere.txt"}, r"/nowhere.txt(?s:.*)public.text"),
            (
                {"public__text": "{public}"},
                r"public.text = .*evaluation.texts names the same text",
            ),
        ],
    )
    def test_unusable_public_text_is_refused_early(
        self, bench: Bench, changes: dict[str, Any], words: str
    ) -> None:
        bench.settings = bench.settings | PUBLIC
        given = {
            key: bench.public if value == "{public}" else value for key, value in changes.items()
        }
        with pytest.raises(EspalierError, match=words):
            bench.run(
                **{
                    key: str(value) if isinstance(value, Path) else value
                    for key, value in given.items()
                }
            )
        assert not (bench.folder / "runs").exists()

    # ----- refusals -------------------------------------------------------------------------------

    def test_empty_width_is_refused_early(self, bench: Bench) -> None:
        words = (
            r"slicegpt.width-pruning-ratio = 0.8: of a residual stream of width 16 no multiple of 4"
            r" would stay; lower it, or slicegpt.multiple"
        )
        with pytest.raises(EspalierError, match=words):
            bench.run(slicegpt__width_pruning_ratio=0.8)
        assert not (bench.folder / "runs").exists()

    def test_model_without_rms_norms_is_refused_early(self, bench: Bench, tmp_path: Path) -> None:
        other = tmp_path / "opt"
        config = OPTConfig(
            vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, ffn_dim=24,
            word_embed_proj_dim=16, max_position_embeddings=64,
        )  # fmt: skip
        OPTForCausalLM(config).save_pretrained(other)
        for file in bench.model.glob("token*"):
            (other / file.name).write_bytes(file.read_bytes())
        with pytest.raises(
            EspalierError,
            match=(
                "model_type = 'opt': the residual stream can be rotated where"
                " only RMS norms read it"
            ),
        ):
            bench.run(model=str(other))
        assert not (bench.folder / "runs").exists()

    @pytest.mark.parametrize("spoilt", ["infinite", "negative", "too long", "too alike"])
    def test_impossible_moments_drop_their_sender(self, bench: Bench, spoilt: str) -> None:
        def spoil(tensors: dict[str, np.ndarray]) -> None:
            values = tensors["moments"]
            if spoilt == "infinite":
                values[3] = np.inf
            elif spoilt == "negative":
                values[0] = -0.5
            elif spoilt == "too long":
                values *= 1.01
            else:
                values[1] = 1.01 * np.sqrt(values[0] * values[WIDTH])

        grid = bench.grid()
        grid.tamper[1] = changing(spoil)
        clients = summary(bench.run(grid))["clients"]
        assert [client["status"] for client in clients] == [
            "completed",
            "dropped",
            "completed",
            "completed",
        ]
        assert "not second moments of signals behind a norm" in clients[1]["reason"]

    def test_claimed_windows_are_capped_by_median(self, bench: Bench) -> None:
        def claim(request: Message, reply: Message) -> Message:
            if read(request.content).header.kind == "train":
                reply.content["fields"]["samples"] = 900_000
            return reply

        grid = bench.grid()
        grid.tamper[1] = claim
        client = summary(bench.run(grid))["clients"][1]
        assert client["status"] == "completed"
        assert client["capped"]["weight"] == {"claimed": 900_000, "counted": 4, "times": 1}

    def test_unrequested_windows_drop_their_sender(self, bench: Bench) -> None:
        grid = bench.grid(federation__client_weights="equal")
        grid.tamper[1] = lambda request, reply: _told(request, reply)
        clients = summary(bench.run(grid, federation__client_weights="equal"))["clients"]
        assert clients[1]["status"] == "dropped"
        assert (
            "samples are sent with moments, only with federation.client-weights = 'samples'"
            in clients[1]["reason"]
        )

    @pytest.mark.parametrize("number", [np.nan, 1.5])
    def test_a_client_takes_no_basis_that_is_none(
        self, plain: Uninterrupted, number: float
    ) -> None:
        settings = parse(plain.bench.config(evaluation__own_text=True))
        plan = OpenedModel(plain.bench.model).plan
        train = next(
            read(request.content)
            for request in plain.requests
            if read(request.content).header.kind == "train"
        )
        header = Header.model_validate(train.header.model_dump() | {"kind": "push", "part": 0})
        contract = contract_for(MessageBody(header, {}), lambda: plan, settings)
        basis = np.eye(WIDTH, KEPT, dtype=np.float32)
        keys = list(contract.down.blobs)  # type: ignore[arg-type]
        check(
            MessageBody(header, {}, {key: pack_tensors({"basis": basis}) for key in keys}),
            contract.down,
        )
        basis[2, 3] = number
        with pytest.raises(
            EspalierError, match="a number is not finite, or a direction is longer than 1"
        ):
            check(
                MessageBody(header, {}, {key: pack_tensors({"basis": basis}) for key in keys}),
                contract.down,
            )


def _told(request: Message, reply: Message) -> Message:
    if read(request.content).header.kind == "train":
        reply.content["fields"]["samples"] = 2
    return reply


def test_public_text_settings_are_read_again() -> None:
    flat = {"method": "slicegpt", "slicegpt.covariances": "public"}
    written = {**flat, "federation.client-weights": "samples"}
    assert parse(written, by_hand=changed(written)) == parse(flat)
    with pytest.raises(
        EspalierError,
        match=(
            r"slicegpt.covariances = 'clients' does not read it; .*slicegpt.covariances = 'public'"
        ),
    ):
        parse(
            {"method": "slicegpt", "public.samples": 3},
            by_hand=["public.samples"],
        )


def test_the_head_of_the_bench_is_its_embedding(tmp_path: Path) -> None:
    """The model has tied embeddings, so every run of this file unties the head."""
    assert OpenedModel(home(tmp_path).model).config["tie_word_embeddings"] is True
