"""Chat template of a result that was tuned on conversations."""

import shutil
from pathlib import Path

from espalier.hf.opening.model_files import CHAT_TEMPLATES as FURTHER_TEMPLATES
from espalier.hf.opening.model_files import beside
from espalier.hf.opening.opened import TOKENIZER_FILES, TOKENIZER_SETTINGS, OpenedModel
from espalier.settings.task import CHAT, CHAT_TEMPLATES, TaskSettings
from espalier.storage.atomic import write_bytes

FILE = "chat_template.jinja"
"""File from which transformers takes a tokenizer's chat template."""
OLD_FILE = "chat_template.json"
"""The same of older releases, for processors."""


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
    wanted = {FILE, OLD_FILE, *TOKENIZER_FILES, *TOKENIZER_SETTINGS} - {"config.json"}
    for file in beside(model.directory):
        if file.name in wanted and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    if template := CHAT_TEMPLATES.get(task.chat_template):
        shutil.rmtree(folder / FURTHER_TEMPLATES, ignore_errors=True)
        write_bytes(folder / FILE, template.encode())
