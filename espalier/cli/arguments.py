"""Arguments that several commands have."""

import argparse


def add_words(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the words that describe a run, with this help text."""
    parser.add_argument("words", nargs="*", metavar="preset | key=value", help=text)
    parser.set_defaults(takes_settings=True)


def add_app(parser: argparse.ArgumentParser) -> None:
    """Add ``--app``."""
    parser.add_argument(
        "--app",
        help="a checkout of Espalier; default: this directory if it is one, else the installed app",
    )


def add_root_certificates(parser: argparse.ArgumentParser) -> None:
    """Add ``--root-certificates``."""
    parser.add_argument(
        "--root-certificates",
        metavar="FILE",
        help="root certificates of that SuperLink; default: no TLS",
    )
