"""What every report page has: its style, and what its words mean."""

GLOSSARY = (
    ("from schedule", "counted from when a request was due, so that waiting in the client is seen"),
    ("from send", "counted from when the request was handed to the socket or engine"),
    ("TTFT", "time to first token: until the first piece of text"),
    ("TPOT", "time per output token: (last text - first text) / (tokens - 1), for each request"),
    ("ITL", "gap before each token after the first; only where the tokens of each chunk are known"),
    ("ICL", "gap between chunks of text; a chunk may hold several tokens"),
    ("E2E", "until the last piece of text"),
    ("queue", "client: from due to sent; server: until first scheduled, as the server told"),
    ("goodput", "requests within all limits of the SLO; failed and unfinished ones are misses"),
    ("interval", "95 %: Student's t over runs, or of the sample of requests of a single run"),
)

STYLE = """
:root { color-scheme: light dark; --paper: #fefefe; --panel: #f6f8fa; --ink: #1f2328;
  --muted: #59636e; --grid: #d8dee4; --blue: #0072b2; --orange: #e69f00; --green: #009e73;
  --vermillion: #d55e00; --purple: #b8578f; --sky: #56b4e9; --on: #ffffff }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #14181d; --panel: #1d232a;
  --ink: #e6eaef; --muted: #9aa5b1; --grid: #353d46; --blue: #4ba3dd; --orange: #f0b43c;
  --green: #35c79b; --vermillion: #f58345; --purple: #e08fc0; --sky: #8fd0f5; --on: #14181d } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif }
main { max-width: 1000px; margin: 0 auto; padding: 20px 16px 60px }
h1 { font-size: 26px; margin: 6px 0 }
h2 { font-size: 20px; margin: 40px 0 10px; border-bottom: 1px solid var(--grid) }
h3 { font-size: 16px; margin: 26px 0 4px }
p { margin: 6px 0 }
a { color: var(--blue) }
.verdict { display: inline-block; padding: 3px 12px; border-radius: 14px; font-weight: 600;
  color: var(--on); background: var(--green) }
.verdict.invalid { background: var(--vermillion) }
.verdict.warned { background: var(--orange); color: #1f2328 }
.command { background: var(--panel); padding: 10px 12px; border-radius: 6px; font-size: 13px;
  white-space: pre-wrap; overflow-wrap: anywhere }
.command span { display: inline-block; max-width: 100% }
.found { font-size: 18px; font-weight: 600 }
.bad, .warn { border-left: 4px solid var(--vermillion); padding: 4px 10px;
  background: var(--panel) }
.warn { border-color: var(--orange) }
.note, figcaption, small { color: var(--muted); font-size: 13px }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px;
  margin-top: 14px }
.tile { background: var(--panel); border-radius: 8px; padding: 10px 12px }
.tile span, .tile small { display: block; color: var(--muted); font-size: 13px }
.tile b { font-size: 22px; font-weight: 600 }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: 10px 0; font-size: 14px;
  font-variant-numeric: tabular-nums }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--grid);
  white-space: nowrap }
th[scope=row] { text-align: left; font-weight: 500; white-space: normal }
thead th { color: var(--muted); font-weight: 500; vertical-align: bottom; white-space: normal }
thead th:first-child { text-align: left }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere }
figure { margin: 0 }
figure svg { display: block; width: 100%; min-width: 640px; height: auto }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans",
  sans-serif !important }
summary { cursor: pointer; margin-top: 14px }
.words dt { font-weight: 600 } .words dd { margin: 0 0 6px 0 }
@media (min-width: 700px) { .words { display: grid; grid-template-columns: 130px 1fr } }
@media print { main { max-width: none; padding: 0 } figure, table, .tiles { break-inside: avoid }
  h2, h3 { break-after: avoid } figure svg { min-width: 0 }
  .verdict, .tile, .command { print-color-adjust: exact; -webkit-print-color-adjust: exact } }
"""
