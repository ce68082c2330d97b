"""Entry point of the ServerApp, which checks the SuperLink before it imports further libraries.

A SuperLink of another installation may lack these libraries.
"""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from espalier.errors import FLOWER_REPORTS_IT_TOO, EspalierError
from espalier.flower.shared_nodes import is_simulation
from server_app.own_superlink import require_own_superlink

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that the settings name, on a SuperLink of this checkout."""
    if is_simulation(grid):
        try:
            require_own_superlink()
        except EspalierError as error:
            print(f"\nthe run failed: {error}\n{FLOWER_REPORTS_IT_TOO}", flush=True)
            raise error.with_traceback(None) from None
    from server_app.app import main as run

    run(grid, context)
