"""Promises about unexpected orders, and one answer per round."""

import shutil
from itertools import count
from typing import Any

import pytest
from flwr.app import Message

from espalier.messages.message import MessageBody
from espalier.messages.records import address, read
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from tests.bench import Bench, Killed
from tests.methods.promises.federations import Federations
from tests.methods.promises.unexpected_orders import unexpected_orders


class OrderPromises(Federations):
    """Orders that a client refuses, and orders that come again."""

    # ----- unexpected orders ----------------------------------------------------------------------

    def test_wrong_order_is_answered_in_words(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Orders that lack something are sent before each request of client 0.

        They go to copies of its state and to a client without state.
        """
        changes = {"evaluation__local_baseline": True}
        grid = bench.grid(**changes)
        seen = dict[tuple[Any, ...], MessageBody]()
        wrong = list[str]()
        numbers = count()
        state = bench.folder / "state"

        def ask(name: str, body: MessageBody, kept: bool) -> None:
            with monkeypatch.context() as patched:
                # Copies stay until the end of all tests, because deleting takes longer.
                copy = bench.folder / f"copy-{next(numbers)}"
                patched.setenv("ESPALIER_STATE_DIR", str(copy))
                if kept:
                    shutil.copytree(state, copy)
                node, context = next(iter(grid.contexts.items()))
                reply = read(grid.answer(address(body, node, 60.0), context).content)
            reason = str(reply.fields.get("reason", ""))
            if "unexpected" in reason:
                wrong.append(
                    f"{body.header.kind} of round {body.header.server_round} {name}: {reason}"
                )

        def before(message: Message) -> None:
            body = read(message.content)
            header = body.header
            place = header.kind, header.server_round, header.part, body.fields.get("what")
            if header.client != 0 or place in seen:
                return
            ask("without state", body, kept=False)
            for name, other in unexpected_orders(body, list(seen.values())[-2:]):
                ask(name, other, kept=True)
            seen[place] = body

        grid.before_push = before
        bench.run(grid, **changes)
        assert len(seen) >= 2
        assert wrong == [], wrong

    # ----- one answer per round -------------------------------------------------------------------

    def other_orders(self, order: MessageBody) -> list[MessageBody]:
        """Return other orders of the same round that the contract allows: with reversed tensors."""
        if not order.blobs:
            return []
        found = {key: unpack_tensors(blob) for key, blob in order.blobs.items()}
        turned = {
            key: pack_tensors({n: v[::-1].copy() for n, v in arrays.items()})
            for key, arrays in found.items()
        }
        return [MessageBody(order.header, order.fields, turned)]

    def test_a_round_is_answered_once(self, bench: Bench) -> None:
        """A repeated order gets the same reply.

        Other orders, and repeated orders of rounds without a stored reply, fail.
        """
        grid = bench.grid(evaluation__local_baseline=True)
        orders = dict[int, MessageBody]()
        later = list[MessageBody]()

        def note(message: Message) -> None:
            body = read(message.content)
            if body.header.kind in ("local_baseline", "evaluate"):
                later.append(body)
                raise Killed
            if body.header.kind == "train" and body.header.client == 0:
                orders[body.header.server_round] = body

        grid.before_push = note
        with pytest.raises(Killed):
            bench.run(grid, evaluation__local_baseline=True)
        replies = [read(reply.content) for partition, reply in grid.received if partition == 0]
        first = {
            reply.header.server_round: reply for reply in replies if reply.header.kind == "train"
        }

        def ask(order: MessageBody, **header: Any) -> MessageBody:
            body = MessageBody(order.header.model_copy(update=header), order.fields, order.blobs)
            node, context = next(iter(grid.contexts.items()))
            return read(grid.answer(address(body, node, 60.0), context).content)

        last = max(orders)
        again = ask(orders[last], attempt=2)
        assert (again.fields, again.blobs) == (first[last].fields, first[last].blobs)
        for order in (other for number in orders for other in self.other_orders(orders[number])):
            words = (
                "another request of round"
                if order.header.server_round == last
                else f"answered round {last}; round"
            )
            assert words in ask(order).fields["reason"]
        for number in set(orders) - {last}:
            # A client keeps the replies of the last two rounds.
            if number == last - 1:
                assert ask(orders[number]).blobs == first[number].blobs
                shutil.rmtree(
                    bench.folder
                    / "state"
                    / orders[number].header.lineage
                    / "node-00000"
                    / f"r{number:03d}"
                )
            assert (
                ask(orders[number])
                .fields["reason"]
                .endswith(f"round {number} is over; start a new run")
            )
        shutil.rmtree(
            bench.folder / "state" / orders[last].header.lineage / "node-00000" / f"r{last:03d}"
        )
        # The client may or may not repeat the work, but it must not report other data or lost
        # state.
        anew = ask(orders[last])
        assert anew.blobs in (first[last].blobs, {})
        assert not anew.fields.get("lost")
        for body in (orders[last], *later):
            assert (
                "of round 5000 does not exist, the run ends with"
                in ask(body, server_round=5000, client=0).fields["reason"]
            )
