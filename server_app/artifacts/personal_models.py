"""Personal results, one per client: models, or masks of a shared generator (SFT-P).

A simulation collects them in the run directory; in a deployment each stays at its site.

Clients evaluate the smaller models that they made with generator and LoRA.
"""

import shutil
from typing import TypeVar

from safetensors.torch import save_file

from espalier.hf.export.adapter import export_adapter
from espalier.hf.stream.edits import dense
from espalier.hf.structured.residual_gates import ResidualGates
from espalier.methods.tuning.sft_p import SftPSettings, lora_plan
from espalier.models.adapters import head_plan
from espalier.models.mask_generator import PREFIX
from espalier.settings.node import NodeSettings
from espalier.storage.atomic import write_json
from espalier.storage.client_state import PrivateState
from espalier.training.mask_history import load
from server_app.artifacts.mask_analysis import draw, mask_figures
from server_app.artifacts.outcome import Outcome
from server_app.report.model_card import adapter_card
from server_app.report.result_size import CLIENTS
from strategies.averaging.adapters import AdapterResult
from strategies.base.method import RunResult
from strategies.base.run import Run

R = TypeVar("R", bound=RunResult)


class PersonalOutcome(Outcome[R]):
    """Result from which each client makes its own model.

    The server evaluates the dense model, clients evaluate their own ones.
    """

    def measure(self, result: R) -> None:
        """Evaluate the dense model; clients evaluate their own."""
        if self.tests.texts:
            self.measure_texts({"dense": dense})
        if self.tests.encoded is not None:
            # Encoders need a classification head; this is the initial one that all clients begin
            # with.
            head = head_plan(self.run.model.plan, self.tests.num_classes)
            self.measure_items(head, {"dense": {}})

    def take_clients_figures(self) -> None:
        """Assign the clients' evaluation to the federated result: each has its own model of it."""
        self.summary.take_personal_figures()
        if self.run.simulation:
            self._collect_models()

    def _collect_models(self) -> None:
        """Move the models of simulated clients, which are on this machine, to the run directory."""
        run = self.run
        root = NodeSettings().state_root()
        folder = run.folder.path / CLIENTS
        for seat in self.summary.roster.seats.values():
            # There is none if the clients do not keep their models.
            written = PrivateState(root, run.lineage, seat.site, {}).own_model
            if written.is_dir():
                folder.mkdir(exist_ok=True)
                shutil.move(written, folder / seat.site)


def where_models_are(run: Run, *, kept: bool) -> str:
    """Return a sentence that names the location of the clients' models."""
    if not kept:
        return "the clients' own models were not stored"
    if run.simulation:
        return f"each client's model is in {run.folder.path / CLIENTS}"
    return "each client's model is at the client, if its owner set models-dir"


class PersonalMasksOutcome(PersonalOutcome[AdapterResult]):
    """Shared tensors from which each client made its own model; the models stay at the clients."""

    def write(self, result: AdapterResult) -> None:
        """Write ``generator.safetensors``, and ``adapter/`` if LoRA was trained.

        The adapter belongs to the full model.
        """
        run = self.run
        self.summary.report = result.report()
        tensors = {
            f"{key}.{name}": value
            for key in result.blobs
            for name, value in result.tensors(key).items()
            if name.startswith(PREFIX)
        }
        target = run.folder.path / "generator.safetensors"
        save_file(tensors, target, {"format": "pt"})
        models = where_models_are(run, kept=run.settings.of(SftPSettings).keep_models)
        self.summary.where = f"the generator is in {target}; {models}"
        plan = lora_plan(run.model.plan, run.settings)
        if plan.blocks:
            card = adapter_card(run.settings, run.model, result.report())
            lora = {
                key: {
                    name: value
                    for name, value in result.tensors(key).items()
                    if not name.startswith(PREFIX)
                }
                for key in plan.shapes()
            }
            export_adapter(run.model, plan, lora.__getitem__, run.folder.path / "adapter", card)

    def take_clients_figures(self) -> None:
        """Take the clients' evaluation and, in a simulation, write the analysis of their masks.

        Simulated clients are on this machine, and so is their client state.
        """
        super().take_clients_figures()
        run = self.run
        if not run.simulation:
            return
        root = NodeSettings().state_root()
        seats = self.summary.roster.seats
        kept = {
            client: load(PrivateState(root, run.lineage, seat.site, {}))
            for client, seat in sorted(seats.items())
        }
        figures = mask_figures(kept, ResidualGates(run.model.plan))
        write_json(run.folder.path / "masks.json", figures)
        names = ", ".join(path.name for path in draw(figures, run.folder.path))
        run.progress.note("pictures", f"pictures     {names} in {run.folder.path}")
