"""Template of the report in Jinja2; every value is escaped except the figures.

It is a module because Flower's bundle of the app carries no HTML files.
"""

PAGE = """\
{% macro head(names) %}<thead><tr>{% for name in names %}<th
{%- if name == "fields" %} class="text"{% endif %}>{{ name }}</th>{% endfor %}</tr></thead>
{%- endmacro %}
{% macro measure(one) %}{{ one.title }}<span class="small">\
{{ "lower" if one.quality.lower_is_better else "higher" }} is better
{%- if one.quality.chance is not none %}; chance {{ one.quality.chance | number(one.digits) }}\
{% endif %}</span>{% endmacro %}
{% macro scores(one, column) %}
{%- if column in one.values %}{% set value = one.values[column] -%}
{{ value.value | number(one.digits) }}
{%- if value.interval %}<span class="small">95%: {{ value.interval[0] | number(one.digits) }} to
{{ value.interval[1] | number(one.digits) }}</span>{% endif %}
{%- if value.clients | length > 1 %}<span class="small">{{ value.clients | length }} clients</span>
{%- endif %}
{%- else %}-{% endif %}
{%- endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ run.name }}: report</title>
<style>{{ style }}</style>
</head>
<body>
<header>
<h1>{{ title }}</h1>
{% if subtitle %}<p>{{ subtitle }}</p>{% endif %}
<p class="soft"><span class="status {{ status }}">{{ status }}</span>
{{ run.name }}, base model {{ base_name }}, seed {{ summary.seed }}</p>
<nav>{% for id, name in sections %}<a href="#{{ id }}">{{ name }}</a>{% endfor %}</nav>
</header>
<main>
<section id="verdict" class="verdict {{ status }}">
{% for sentence in verdict %}<p>{{ sentence }}</p>
{% endfor %}
{% if files_gone %}<p class="warning">Warning: the files of the result are no longer in this \
directory; the figures are those of the run.</p>
{% endif %}
{% for warning in summary.get("warnings") or () %}<p class="warning">Warning: {{ warning }}</p>
{% endfor %}
{% for reason, sites in missing.items() %}<p class="warning">Not in the result: \
{{ sites | join(", ") }}
({{ reason }})</p>
{% endfor %}
{% for site, reason in (summary.get("refused") or {}).items() %}<p class="warning">\
{{ site }} was refused:
{{ reason }}</p>
{% endfor %}
{% if "\\n" in (summary.reason or "") and status == "failed" %}\
<details><summary>The whole reason</summary>
<pre>{{ summary.reason }}</pre></details>{% endif %}
</section>
{% if comparisons %}
<section id="quality"><h2>Quality</h2>
<div class="figures pair">
{% if figures.models %}<figure>{{ figures.models }}</figure>{% endif %}
<div>
<div class="scroll"><table>
{# The shorter side is across, so that the table fits on a phone. #}
{% if comparisons | length < columns | length %}
<thead><tr><th></th>{% for one in comparisons %}<th>{{ measure(one) }}</th>{% endfor %}</tr></thead>
<tbody>{% for column, name in columns.items() %}<tr class="{{ column }}"><td>{{ name }}</td>
{% for one in comparisons %}<td>{{ scores(one, column) }}</td>{% endfor %}</tr>{% endfor %}</tbody>
{% else %}
{{ head([""] + columns.values() | list) }}
<tbody>{% for one in comparisons %}<tr><td>{{ measure(one) }}</td>
{% for column in columns %}<td class="{{ column }}">{{ scores(one, column) }}</td>{% endfor %}
</tr>{% endfor %}</tbody>
{% endif %}
</table></div>
<p class="soft">{% if "original" in columns %}Original is the model from which the chain of runs
started, base the one from which this run did.{% elif names.dense == "dense" %}Dense is the base
model.{% else %}Base is the model from which this run started; another run made it.{% endif %}\
{% if "local_baseline" in columns %} The local baseline is what a client gets without the others.\
{% endif %}{% if "centralized" in columns %} The centralized baseline is what one party gets that
has all data.{% endif %} A value of several clients is their mean{% if intervals.of_clients %}; its
interval contains the mean over further clients like these with 95% confidence (Student's t){% endif
%}.{% if intervals.of_items %} Scores are of {{ summary.test_items.number }} items; their intervals
contain the score on all such items with 95% confidence (Wilson).{% endif %}{% if has_chance %}\
 Chance is the value without knowledge: of random choice or of the most common class, and for a loss
of equal probabilities.{% endif %}</p>
{% if not figures.rounds and by_round %}
<p class="soft">Quality was measured at the end only; <code>evaluation.every=1</code> measures it
after every round.</p>
{% endif %}
</div></div>
</section>
{% endif %}
{% if task_rows %}
<section id="tasks"><h2>Public tasks</h2>
<div class="scroll"><table>
{{ head(["task", "metric", "items", "examples"] + task_models) }}
<tbody>{% for row in task_rows %}<tr><td>{{ row.title }}</td><td class="text">{{ row.metric }}</td>
<td>{{ row.items }}</td><td>{{ row.num_fewshot }}</td>
{% for name in task_models %}<td>{% if name in row["values"] -%}
{% set value, error = row["values"][name] %}{{ value | number(4) }}
{%- if error is not none %}<span class="small">±{{ error | number(4) }}</span>{% endif %}
{%- else %}-{% endif %}</td>{% endfor %}</tr>{% endfor %}</tbody>
</table></div>
<p class="soft">Scores of lm-evaluation-harness by <code>espalier eval</code>; ± is the standard
error over the items.</p>
</section>
{% endif %}
{% if sizes or measurements %}
<section id="size"><h2>Size and speed</h2>
{% if sizes %}<div class="scroll"><table>
{{ head(["", "parameters", "of the base", "on disk"]) }}
<tbody>{% for column, name, model, ratio in sizes %}<tr class="{{ column }}"><td>{{ name }}</td>
<td>{{ "+" if model.is_adapter }}{{ model.parameters | number(0) }}</td>
<td>{{ "-" if ratio is none else ratio | percent }}</td>
<td>{{ "-" if model.num_bytes is none else model.num_bytes | size }}</td></tr>{% endfor %}</tbody>
</table></div>{% endif %}
{% if measurements %}
<div class="scroll"><table>
{{ head(["measured", "memory", "peak", "load", "prompt, tokens/s", "generation, tokens/s"]) }}
<tbody>{% for row in measurements.models %}<tr><td>{{ names.get(row.name, row.name) }}</td>
<td>{{ row.model_memory | size }}</td><td>{{ row.peak_memory | size }}</td>
<td>{{ row.load_seconds | number(2) }} s</td>
<td>{{ row.prompt_tokens_per_second | number(1) }}</td>
<td>{% if row.new_tokens_per_second is none %}-{% else -%}
{{ row.new_tokens_per_second | number(1) }}{% endif %}</td></tr>{% endfor %}</tbody>
</table></div>
<p class="soft">{{ measurements.conditions }}</p>
{% elif has_result %}
<p>Load memory and tokens per second of this result are not measured yet. On the machine that has
both models, this measures them and adds the figures to this page:</p>
<pre>espalier report --measure {{ run.path | quoted }}</pre>
{% endif %}
</section>
{% endif %}
{% if figures.rounds %}
<section id="rounds"><h2>Quality by round</h2><figure>{{ figures.rounds }}</figure></section>
{% endif %}
{% if clients %}
<section id="clients"><h2>Clients</h2>
{% if figures.clients %}<div class="figures pair">{% for one in figures.clients %}
<figure>{{ one }}</figure>{% endfor %}</div>{% endif %}
<div class="scroll"><table>
{{ head(["site", "sent", "received", "work"] + client_measures.values() | list) }}
<tbody>{% for client in clients %}<tr><td>{{ client.site }}
<span class="small">{{ client.status }}</span>
{%- if client.reason %}<span class="small">{{ client.reason | truncate(80) }}</span>{% endif %}
{%- if client.capped %}<span class="small">limited: {{ client.capped | join(", ") }}</span>\
{% endif %}
</td>
<td>{{ client.bytes_up | size }}</td><td>{{ client.bytes_down | size }}</td>
<td>{{ client.seconds | duration }}</td>
{% for name in client_measures %}<td>{% if client.metrics.get(name) is none %}-{% else -%}
{{ client.metrics[name] | brief }}{% endif %}</td>{% endfor %}
</tr>{% endfor %}</tbody>
</table></div>
{% if clients | selectattr("capped") | list %}<p class="soft">Limited: values that were larger than
the median client's allow (<code>federation.max-update-ratio</code>,
<code>federation.max-weight-ratio</code>) counted less. This also happens to honest clients.</p>
{% endif %}
</section>
{% endif %}
{% if traffic %}
<section id="bytes"><h2>Bytes between sites and server</h2>
<div class="figures pair"><figure>{{ figures.bytes }}</figure>
<div class="scroll"><table>
{{ head(["message", "up", "down", "messages"]) }}
<tbody>{% for kind in traffic %}<tr><td>{{ kind.name }}
<span class="small">{{ kind.meaning }}</span></td>
<td>{{ kind.up | size }}</td><td>{{ kind.down | size }}</td><td>{{ kind.messages }}</td></tr>
{%- endfor %}
<tr class="federated"><td>all</td><td>{{ traffic | sum("up") | size }}</td>
<td>{{ traffic | sum("down") | size }}</td>
<td></td></tr></tbody>
</table></div></div>
<p class="soft">\
All messages that were sent, with the enrolment and with messages that were sent again
after a loss or an interruption. The other numbers of this page count finished rounds once.</p>
</section>
{% endif %}
{% if estimates %}
<section id="estimate"><h2>Estimated and measured</h2>
<div class="scroll"><table>
{{ head(["", "estimate", "measured", "ratio"]) }}
<tbody>{% for row in estimates %}<tr><td>{{ row.what }}\
{% if row.note %}<span class="small">{{ row.note }}</span>{% endif %}</td>
<td class="wide">{{ row.estimate }}</td>
<td>{{ row.measured }}</td><td>{{ "-" if row.ratio is none else row.ratio | percent }}</td></tr>
{%- endfor %}</tbody></table></div>
<p class="soft">\
The ratio is measured / estimate. Bytes are without the enrolment and without messages that were
sent again. A client's measured time includes reading and tokenization, which the estimate of its
computing does not; in rounds of a few seconds they are most of it.
Real sites do not report their memory; in a simulation the processes of clients and server also hold
Ray, which the estimate does not.</p>
</section>
{% endif %}
{% if layers.maps or layers.notes %}
<section id="layers"><h2>What was changed in each layer</h2>
{% for note in layers.notes %}<p>{{ note }}</p>{% endfor %}
<div class="figures pair">\
{% for one in figures.layers %}<figure>{{ one }}</figure>{% endfor %}</div>
</section>
{% endif %}
<section id="egress"><h2>What left each site</h2>
{% if logs %}
<p>Each site logs what leaves it: names, shapes, bytes and hashes, but no values.</p>
{% for log in logs %}
<details{% if logs | length <= 2 %} open{% endif %}>
{% set checked = log.checked %}
<summary>{{ log.site }}: {{ checked.kinds["reply"] | count("reply", "replies") }}, \
{{ checked.num_bytes | size }},
{{ "log is intact" if not checked.fault else "LOG IS BROKEN" }}</summary>
{% if checked.fault %}<p class="warning">{{ log.file }}: {{ checked.fault }}</p>{% endif %}
<div class="scroll"><table>
{{ head(["message", "replies", "bytes", "tensors", "fields"]) }}
<tbody>{% for kind in log.kinds.values() %}<tr><td>{{ kind.kind }}</td><td>{{ kind.number }}</td>
<td>{{ kind.num_bytes | size }}</td><td>{{ kind.tensors }}
{%- if kind.dtypes %}<span class="small">{{ kind.dtypes | sort | join(", ") }}</span>{% endif %}\
</td>
<td class="text">{{ kind.fields | sort | join(", ") }}</td></tr>{% endfor %}</tbody></table></div>
<p class="soft">From {{ checked.first }} to {{ checked.last }}
{%- set others = checked.entries - checked.kinds["reply"] %}
{%- if others %}, with {{ others | count("entry", "entries") }} on approval{% endif %}.
Last hash: <code>{{ checked.head }}</code></p>
<details><summary>The first {{ log.beginning | length | count("entry", "entries") }}</summary>
<pre>{{ log.beginning | join("\\n") }}</pre></details>
</details>
{% endfor %}
<pre>espalier check-log {{ run.path | quoted }}</pre>
{% else %}
<p>The logs of what left the sites are at the sites, in <code>egress/</code> of their state-dir; a
simulation copies them to its run directory at the end. Each site verifies its own with
<code>espalier check-log STATE-DIR</code>. The table of bytes above is the server's count.</p>
{% endif %}
</section>
<section id="use"><h2>Use the result</h2>
{% for snippet in snippets %}<h3>{{ snippet.title }}</h3>
{% if snippet.note %}<p>{{ snippet.note }}</p>{% endif %}
{% if snippet.text %}<pre>{{ snippet.text }}</pre>{% endif %}
{% else %}<p>This run has written no model and no adapter
{{- " yet" if status in ("running", "interrupted") }}.</p>
{% endfor %}
</section>
<section id="settings"><h2>Settings</h2>
<p>Settings that differ from the defaults. The same settings and seed give the same result.</p>
<div class="scroll"><table><thead><tr><th>key</th><th class="text">value</th>
<th class="text">default</th></tr></thead>
<tbody>{% for one in changed %}<tr><td class="key"><code>{{ one.key }}</code></td>
<td class="text"><code>{{ one.value }}</code></td>
<td class="text"><code>{{ one.default }}</code></td></tr>{% endfor %}</tbody></table></div>
<details><summary>All settings</summary><pre>{{ settings }}</pre></details>
<p class="soft">{% for name, number in (summary.get("versions") or {}).items() %}\
{{ name }} {{ number }}
{{- ", " if not loop.last }}{% endfor %}; {{ summary.threads }} threads, {{ summary.device }}</p>
</section>
</main>
</body>
</html>
"""
