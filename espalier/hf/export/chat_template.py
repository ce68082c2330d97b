"""Chat template of a result that was tuned on conversations."""

import shutil
from pathlib import Path

from espalier.environment.hub_models import FURTHER_TEMPLATES
from espalier.hf.opening.model_files import other_files
from espalier.hf.opening.opened_model import TOKENIZER_FILES, TOKENIZER_SETTINGS, OpenedModel
from espalier.hf.tokenizer.files import TEMPLATE_FILE
from espalier.settings.tables.task import CHAT, CHAT_TEMPLATES, TaskSettings
from espalier.storage.atomic import write_bytes

OLD_FILE = "chat_template.json"
"""File with a processor's chat template, of older releases."""


def add_chat_template(task: TaskSettings, model: OpenedModel, folder: Path) -> None:
    """Add tokenizer and chat template to a result, if it was tuned on conversations.

    Parameters
    ----------
    task : table ``[task]`` of the run
    model : the base model
    folder : directory of the adapter or model
    """
    if task.name != CHAT:
        return
    names = {TEMPLATE_FILE, OLD_FILE, *TOKENIZER_FILES, *TOKENIZER_SETTINGS} - {"config.json"}
    for file in other_files(model.directory):
        if file.name in names and not (folder / file.name).exists():
            # Files that the result has already stay.
            shutil.copyfile(file, folder / file.name)
    if template := CHAT_TEMPLATES.get(task.chat_template):
        # A template of the settings replaces all others.
        shutil.rmtree(folder / FURTHER_TEMPLATES, ignore_errors=True)
        write_bytes(folder / TEMPLATE_FILE, template.encode())
