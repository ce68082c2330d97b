"""FedSpine's result: the global adapters for peft, and the structure that each device keeps.

Each device makes its own smaller model from both.
"""

from collections.abc import Sequence
from typing import Any

from espalier.amounts import count
from espalier.evaluation.perplexity import mean_losses
from espalier.hf.export.adapter import export_adapter
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.whole.adapters import merged
from espalier.methods.tuning.fedspine import FedSpineSettings
from espalier.storage.atomic import finite_values, write_json
from espalier.training.adapted_model import AdaptedModel
from server_app.artifacts.outcome import perplexities
from server_app.artifacts.personal_models import PersonalOutcome, where_models_are
from server_app.artifacts.task_scores import scores_of
from server_app.report.model_card import adapter_card
from strategies.fleet import seconds_of_all
from strategies.tuning.fedspine.result import RefinedResult


class RefinedOutcome(PersonalOutcome[RefinedResult]):
    """Adapters and structures from which the devices made their smaller models.

    The models stay at the devices.
    """

    def intermediate_metrics(self, result: RefinedResult, clients: Sequence[int]) -> dict[str, Any]:
        """Return metrics of the devices' smaller models, by name and device.

        The server can build these models because it knows all cuts. ``seconds`` is the time of all
        rounds so far.
        """
        figures_by_cut: dict[bytes, dict[str, float | None]] = {}
        # Devices with the same cut have the same model, so it is evaluated once.
        for client in clients:
            bits = result.bits(client)
            if bits not in figures_by_cut:
                figures_by_cut[bits] = self._figures_of(result, client)
        client_figures = {client: figures_by_cut[result.bits(client)] for client in clients}
        figures = {
            name: {str(client): values[name] for client, values in client_figures.items()}
            for name in next(iter(client_figures.values()))
        }
        return {
            "scores" if self.tests.encoded else "perplexity": figures,
            "seconds": seconds_of_all(result.rounds),
        }

    def _figures_of(self, result: RefinedResult, client: int) -> dict[str, float | None]:
        """Return the metrics of one device's model."""
        run = self.run
        model = OpenedModel(run.model.directory, result.structure_of(client))
        adapters = result.plan_for(client, run.settings.lora.rank)
        tensors = {
            key: result.part_for(client, key, result.tensors(key)) for key in adapters.shapes()
        }
        if self.tests.encoded is None:
            edits = merged(adapters, tensors)
            return perplexities(
                mean_losses(BlockStream(model, run.computing), self.tests.texts, edits)
            )
        adapted = AdaptedModel.load(model, run.computing, run.settings, adapters)
        adapted.set(tensors)
        scores: dict[str, float | None] = finite_values(scores_of(run, adapted, self.tests))
        return scores

    def note_times(self, result: RefinedResult) -> None:
        """Record the times of the simulated fleet's clock, or those that the devices measured."""
        settings = self.run.settings
        pretended = settings.federation.fleet_name(settings.job, simulation=self.run.simulation)
        self.summary.take_times(result.rounds, "virtual_seconds" if pretended else "seconds")

    def write(self, result: RefinedResult) -> None:
        """Write the files of the result.

        They are ``adapter/`` for the whole model, ``structures/`` with one file per device, and
        ``refinements.json``.
        """
        run = self.run
        path = run.folder.path
        self.summary.report = result.report()
        target = path / "adapter"
        card = adapter_card(run.settings, run.model, self.summary.report)
        export_adapter(run.model, result.adapters, result.tensors, target, card)
        ranks = {
            client: device.rank for note in result.rounds for client, device in note.devices.items()
        }
        for client in sorted(self.summary.roster.seats):
            write_json(
                path / "structures" / f"client-{client:04d}.json",
                {
                    "client": client,
                    "pruned": result.groups.ratio(result.cut_of(client)),
                    "lora_rank": ranks.get(client),
                    "structure": result.structure_of(client).to_json(),
                },
            )
        rounds = [note.to_json() for note in result.rounds]
        write_json(path / "refinements.json", {"rounds": rounds})
        self._note_who_has_cut_less(result)
        models = where_models_are(run, kept=run.settings.of(FedSpineSettings).keep_models)
        self.summary.where = (
            f"the adapter is in {target}, the structure of each client's model in structures/;"
            f" {models}"
        )

    def _note_who_has_cut_less(self, result: RefinedResult) -> None:
        """Add a note on devices that missed the pruning ratio, which a bandit does not enforce."""
        job = self.run.settings.of(FedSpineSettings)
        ratio = result.groups.wanted(job)
        cuts = [result.cut_of(seat.client) for seat in self.summary.roster.active()]
        behind = sum(not result.groups.reaches(cut, ratio, job) for cut in cuts)
        if not behind:
            return
        scopes = {"global": "", "block": " in every block", "kind": " of each kind in every block"}
        steps = job.rounds_of_pruning(self.run.settings.federation.rounds)
        others = ", or lower fedspine.prune-rounds" if steps > 1 else ""
        self.summary.notes.append(
            f"{behind} of {count(len(cuts), 'client')} did not reach pruning.ratio ="
            f" {job.pruning_ratio:g}{scopes[job.selection]}; raise federation.rounds{others}."
        )
