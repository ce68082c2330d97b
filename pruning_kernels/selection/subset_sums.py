"""Non-overlapping groups of consecutive elements with minimal cost, by dynamic programming."""

from collections.abc import Sequence


def cheapest_groups(costs: Sequence[float], span: int, number: int) -> list[int]:
    """Return the starts of ``number`` non-overlapping groups with the smallest sum of costs.

    A group has ``span`` consecutive elements. Of several optimal choices the one whose last groups
    begin earliest is returned.

    Parameters
    ----------
    costs : cost of the group that begins at 0, 1, ...; a group can end after the last of these
    span : number of elements of a group, at least 1
    number : number of groups, at least 0

    Returns
    -------
    list of int
        Starts, ascending.

    Raises
    ------
    ValueError
        There is not enough room for the groups.
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
