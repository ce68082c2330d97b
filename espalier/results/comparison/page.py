"""Comparison of runs as one self-contained HTML page."""

from jinja2 import Environment
from markupsafe import Markup

from espalier.results.comparison.compared_runs import Comparison
from espalier.results.comparison.pareto import Plot, draw
from espalier.results.comparison.table import notes, results_table, settings_table

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Comparison of {{ number }} runs</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 70rem; padding: 1rem;
  color: #1a1a1a; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: left;
  vertical-align: top; }
th { border-bottom: 2px solid #555; }
td.best { font-weight: 700; }
td { white-space: nowrap; }
.wrap td { white-space: normal; overflow-wrap: anywhere; min-width: 4rem; max-width: 18rem; }
.wrap td:first-child { white-space: nowrap; }
@media (max-width: 480px) {
  th, td { padding: .3rem; }
  td:nth-child(2) { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
}
svg { max-width: 100%; height: auto; }
</style>
</head>
<body>
<h1>Comparison of {{ number }} runs</h1>
<p>Base model: {{ base }}. The best value of a column is bold.</p>
{% macro shown(table) %}
<div class="scroll"><table>
<thead><tr>{% for title in table.titles %}<th scope="col">{{ title }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>{% for cell in row %}<td{% if cell.best %} class="best"{% endif %}>{{ cell.text }}</td>
{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}
{{ shown(results) }}
{% if plot %}
<h2>Pareto plot: {{ plot_title }}</h2>
<div class="scroll">{{ plot }}</div>
{% endif %}
{% if settings.rows %}
<h2>Settings that differ</h2>
<div class="wrap">{{ shown(settings) }}</div>
{% endif %}
{% if notes %}
<h2>Notes</h2>
<ul>{% for line in notes %}<li>{{ line }}</li>{% endfor %}</ul>
{% endif %}
</body>
</html>
"""


def html_page(comparison: Comparison, plot: Plot | None) -> str:
    """Return the page, with the plot as inline SVG; it loads nothing from elsewhere."""
    image = ""
    title = ""
    if plot is not None:
        # The XML declaration before the element is not allowed within a page.
        drawn = draw(plot, "svg").decode()
        image = drawn[drawn.index("<svg") :]
        title = f"{plot.quality_title} against {plot.cost_title}"
    page = Environment(autoescape=True).from_string(PAGE)
    return page.render(
        number=len(comparison.entries),
        base=comparison.entries[0].base_name,
        results=results_table(comparison, plot),
        settings=settings_table(comparison),
        notes=notes(comparison),
        plot=Markup(image),
        plot_title=title,
    )
