"""Groups of neighbours that do not overlap, with the smallest sum of costs: dynamic programming."""

from collections.abc import Sequence


def cheapest_groups(costs: Sequence[float], span: int, number: int) -> list[int]:
    """The starts of ``number`` groups of ``span`` neighbours each, of which no two overlap, with the smallest sum of costs.

    Of several such choices it is the one whose last groups begin earliest.

    Parameters
    ----------
    costs : of the group that begins at 0, 1, ...; a group may end behind the last of them
    span : neighbours of a group, 1 or more
    number : 0 or more

    Returns
    -------
    Starts, ascending.

    Raises
    ------
    ValueError
        There is no room for so many groups.
    """
    if number and len(costs) < (number - 1) * span + 1:
        raise ValueError(
            f"{number} groups of {span} need {(number - 1) * span + 1} starts or more, there are"
            f" {len(costs)}"
        )
    infinite = float("inf")
    size = len(costs)
    # best[j][e]: smallest sum of j groups whose starts are below e
    best = [[0.0] * (size + 1)]
    for group in range(1, number + 1):
        row = [infinite] * (size + 1)
        for end in range(1, size + 1):
            before = best[group - 1][max(0, end - span)]
            row[end] = min(row[end - 1], before + costs[end - 1])
        best.append(row)
    starts = list[int]()
    end = size
    for group in range(number, 0, -1):
        while best[group][end - 1] == best[group][end]:
            end -= 1
        starts.append(end - 1)
        end = max(0, end - span)
    return starts[::-1]
