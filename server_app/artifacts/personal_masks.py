"""SFT-P's result: the shared generator, LoRA for peft, and the clients' evaluation.

Clients evaluate the smaller models that they made with generator and LoRA.
"""

from importlib.util import find_spec

from safetensors.torch import save_file
from torch import Tensor

from espalier.hf.export.adapter import export_adapter
from espalier.hf.structured.residual_gates import ResidualGates
from espalier.methods.sft_p import SftPSettings, lora_plan
from espalier.models.mask_generator import PREFIX
from espalier.settings.node import NodeSettings
from espalier.storage.atomic import write_json
from espalier.storage.client_state import PrivateState
from espalier.training.sft_p.mask_history import load
from server_app.artifacts.mask_analysis import draw, mask_figures
from server_app.artifacts.personal_models import PersonalOutcome, where_models_are
from server_app.report.model_card import adapter_card
from strategies.averaging.adapters import AdapterResult


class PersonalMasksOutcome(PersonalOutcome[AdapterResult]):
    """Shared tensors from which each client made its own model; the models stay at the clients."""

    def write(self, result: AdapterResult) -> None:
        """Write ``generator.safetensors``, and ``adapter/`` if LoRA was trained.

        The adapter belongs to the full model.
        """
        run = self.run
        self.summary.report = result.report()
        tensors: dict[str, Tensor] = {}
        for key in result.blobs:
            tensors |= {
                f"{key}.{name}": value
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
        """Take the clients' evaluation and, in a simulation, write the analysis of their masks."""
        super().take_clients_figures()
        if self.run.simulation:
            self._show_masks()

    def _show_masks(self) -> None:
        """Write ``masks.json`` and its plots.

        Simulated clients are on this machine, and so is their client state.
        """
        run = self.run
        root = NodeSettings().state_root()
        seats = self.summary.roster.seats
        kept = {
            client: load(PrivateState(root, run.lineage, seat.site, {}))
            for client, seat in sorted(seats.items())
        }
        figures = mask_figures(kept, ResidualGates(run.model.plan))
        write_json(run.folder.path / "masks.json", figures)
        if find_spec("matplotlib") is None:
            run.progress.note(
                "no_pictures",
                "no pictures: matplotlib is not installed; pip install 'espalier[studies]'",
            )
            return
        names = ", ".join(path.name for path in draw(figures, run.folder.path))
        run.progress.note("pictures", f"pictures     {names} in {run.folder.path}")
