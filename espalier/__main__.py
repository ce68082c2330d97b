"""``python -m espalier``: the ``espalier`` command."""

from espalier.cli.command import main

raise SystemExit(main())
