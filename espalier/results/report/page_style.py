"""Style sheet of the report: one column on a phone, wide tables that scroll within their frame."""

STYLE = """
:root { --ink: #1a1a1a; --soft: #595959; --line: #d9d9d9; --paper: #ffffff; --tint: #f5f7f9;
  --blue: #0072B2; --vermillion: #D55E00; --green: #009E73; --orange: #E69F00; }
* { box-sizing: border-box; }
html { color-scheme: light; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--tint); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main, header { max-width: 1080px; margin: 0 auto; padding: 0 16px; }
header { padding-top: 24px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 10px; }
h3 { font-size: 1rem; margin: 18px 0 6px; }
p { margin: 0 0 10px; }
.soft { color: var(--soft); font-size: 0.9rem; overflow-wrap: anywhere; }
.status { display: inline-block; border-radius: 4px; padding: 1px 8px; color: #ffffff;
  background: var(--soft); font-size: 0.9rem; }
.status.completed { background: #00785a; }
.status.failed { background: #b34d00; }
.status.running { background: var(--blue); }
nav { margin: 12px 0; display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 0.9rem; }
a { color: #005a8f; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 8px;
  padding: 16px; margin: 0 0 16px; min-width: 0; }
.verdict { border-left: 6px solid var(--blue); font-size: 1.05rem; overflow-wrap: anywhere; }
.verdict.failed { border-left-color: var(--vermillion); }
.warning { border-left: 4px solid var(--orange); padding-left: 10px; }
.figures { display: grid; gap: 16px; grid-template-columns: 1fr; align-items: start; }
.figures > * { min-width: 0; }
figure { margin: 0; }
figure svg { display: block; width: 100%; max-width: 560px; height: auto; }
.scroll { overflow-x: auto; margin: 0 0 10px; background-repeat: no-repeat;
  background-image: linear-gradient(90deg, var(--paper) 40%, transparent),
    linear-gradient(270deg, var(--paper) 40%, transparent),
    linear-gradient(90deg, #9aa4ad, transparent), linear-gradient(270deg, #9aa4ad, transparent);
  background-position: 0 0, 100% 0, 0 0, 100% 0; background-size: 36px 100%, 36px 100%, 14px 100%,
    14px 100%; background-attachment: local, local, scroll, scroll; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line);
  vertical-align: top; font-variant-numeric: tabular-nums; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal;
  min-width: 8.5em; }
td.text, th.text { text-align: left; white-space: normal; min-width: 12em; }
td.key { white-space: nowrap; }
thead th { color: var(--soft); font-weight: 600; white-space: normal; }
tr.federated td, td.federated { font-weight: 600; }
.small { display: block; white-space: normal; color: var(--soft); font-size: 0.85em; \
font-weight: 400; }
code, pre { font-family: ui-monospace, "SFMono-Regular", Menlo, "DejaVu Sans Mono", monospace;
  font-size: 0.85rem; }
td.text code, p code { overflow-wrap: anywhere; }
pre { background: var(--tint); border: 1px solid var(--line); border-radius: 6px; padding: 10px;
  overflow-x: auto; margin: 0 0 10px; }
details { margin: 8px 0; }
summary { cursor: pointer; }
@media (max-width: 480px) {
  section { padding: 12px; }
  th, td { padding: 5px 4px; }
  th:first-child, td:first-child { min-width: 6.5em; }
  td.text, th.text { min-width: 6em; }
  td.wide { white-space: normal; min-width: 5em; }
  td.key { white-space: normal; overflow-wrap: anywhere; min-width: 9em; }
}
@media (min-width: 900px) { .figures.pair { grid-template-columns: 1fr 1fr; } }
@media print { body { background: #ffffff; } section { break-inside: avoid; } \
nav { display: none; } }
"""
