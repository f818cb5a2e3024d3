"""
Write report.html, a page with the results of a comparison, sweep or ladder. It needs no other files.

    report.write(folder, 'Sweep', verdict_lines, {'Learning rates': rows}, {'what the picture shows': figure})

The template is report.html beside this file. The page shows the verdict, pictures and tables, and from the files of the
runs the keys in which they differ, a command to repeat each, and where they ran. All text from outside is escaped.
"""

import contextlib
import io
import math
import re
from html import escape
from pathlib import Path
from string import Template

from comparison import results

# {how a line of the verdict begins: what to print for readers who do not know compare.py}
LEADS = {
    'may differ': 'Other losses, as they should be',
    'fastest': 'Fastest',
}
WARNS = re.compile(r'WARNING|do NOT|NOT |do not trust|failed|not finished|.*EXTRAPOLATED|.*no clear difference')


def write(folder, kind, lines, tables, figures):
    """
    Write folder/report.html. lines: the verdict, each as 'lead: text'. tables: {title: [{column: text}]}. figures:
    {caption: matplotlib's Figure}, empty if it is not installed.
    """
    runs = [run_facts(path) for path in sorted(folder.glob('runs/*/*'))]
    parts = [f'<figure class="card wide">{svg(figure, caption)}<figcaption>{escape(caption)}</figcaption></figure>'
             for caption, figure in figures.items()]  # fmt: skip
    parts = ['<h2>Pictures</h2>', *parts] if parts else ['<p>No pictures: pip install matplotlib</p>']
    run_tables = {'Runs, and the keys in which they differ': differences(runs), 'Environment': environment(runs)}
    for title, rows in {**tables, **run_tables}.items():
        parts += [f'<h2>{escape(title)}</h2>', table(rows)] if rows else []
    parts.append('<h2>Commands that repeat a run</h2>\n<div class=card>')
    for run in runs:
        words = (run['command'] or 'none is known: the run ended before it began its train.log').split(' ')
        command = ' '.join(f'<span>{escape(word)}</span>' for word in words)
        parts.append(f'<details><summary>{escape(run["name"])}</summary><pre>{command}</pre></details>')
    about = [f'{sum(not run["failure"] for run in runs)} of {len(runs)} runs ended well']
    about += sorted({run['date'][:10] for run in runs if run['date']})
    page = Template(Path(__file__).with_name('report.html').read_text(encoding='utf-8')).substitute(
        title=escape(f'{kind}: {folder.absolute().name}'),
        about=escape(' · '.join(about)),
        verdict='\n'.join(map(item, lines)),
        body='\n'.join([*parts, '</div>']),
    )
    results.write(folder / 'report.html', page)


# --- WHAT THE RUNS TELL -----------------------------------------------------------------------------------------------


def run_facts(path):
    """{'name', 'rows', 'config', ...} from the files in a run's out_dir and from the head of its train.log."""
    run = results.read_run(path) or results.Run(failure='not finished')
    head = {'date': '', 'command': '', 'code': '', 'versions': '', 'host': ''}
    with contextlib.suppress(OSError):
        begin = (path / 'train.log').read_text(encoding='utf-8', errors='replace')[:20_000]
        head['date'] = begin[:16]
        for key, text in re.findall(r'^\S+ \S+ (command|code|versions|host): (.*)$', begin, re.M)[:4]:
            head[key] = text
    head['command'] = portable(head['command'], name := f'{path.parent.name}/{path.name}')
    return {'name': name, 'rows': run.rows, 'config': run.config, 'about': run.about, 'failure': run.failure, **head}


def portable(command, name):
    """The command in a train.log as you would type it in the project's folder, with a new out_dir, since the old one
    has a run."""
    if not (found := re.fullmatch(r'\S+ \S*?([\w.]+\.py) ?(.*) \(WORLD_SIZE=(\d+)\)', command)):
        return command
    script, keys, ranks = found.groups()
    start = 'python' if ranks == '1' else f'torchrun --nproc_per_node={ranks}'
    keys = re.sub(r"(?:^| )(?:'--(?:out_dir|resume)=[^']*'|--(?:out_dir|resume)=\S*)", '', keys)
    return f'{start} {script} {keys} --out_dir=out/again/{name}'


def differences(runs):
    """A row for each run: how it ended, and those keys of its configuration that differ between runs."""
    configs = [{key: run['about'][key] for key in ('script', 'world_size') if key in run['about']} | run['config']
               for run in runs]  # fmt: skip
    keys = dict.fromkeys(key for config in configs for key in config if key not in ('out_dir', 'resume'))
    keys = [key for key in keys if len({str(config[key]) for config in configs if key in config}) > 1]
    found = []
    for run, config in zip(runs, configs, strict=True):
        last = run['rows'][-1] if run['rows'] else {}
        row = {'run': run['name'], 'loss': '', 'val_loss': '', 'why it failed': run['failure']}
        row |= {key: f'{last[key]:.4f}' for key in ('loss', 'val_loss') if math.isfinite(last.get(key, math.nan))}
        values = {key: config.get(key, '') for key in keys}
        row |= {key: f'{value:.6g}' if isinstance(value, float) else str(value) for key, value in values.items()}
        found.append(row | {'started': run['date']})
    return found


def environment(runs):
    """Rows on the code and machine of the runs, from their logs, with several values if these differ."""
    of = {'git commit': 'code', 'versions': 'versions', 'machine': 'host'}
    found = {what: ' | '.join(dict.fromkeys(run[key] for run in runs if run[key])) for what, key in of.items()}
    return [{'what': what, 'value': value} for what, value in found.items() if value]


# --- HTML -------------------------------------------------------------------------------------------------------------


def item(line):
    """A line of the verdict as HTML, with its lead in bold, and marked if it is a warning."""
    lead, colon, text = line.partition(': ')
    text = f'<b>{escape(LEADS.get(lead, lead))}:</b> {escape(text)}' if colon else escape(line)
    return f'<li{" class=warn" if WARNS.match(line) else ""}>{text}</li>'


def table(rows):
    """Rows {column: text} as an HTML table that scrolls in its box, without empty columns."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)] if rows else []
    cells = [[f'<td{" class=long" if len(row[title]) > 15 else ""}>{escape(row[title])}</td>' for title in titles]
             for row in rows]  # fmt: skip
    head = ''.join(f'<th>{escape(title)}</th>' for title in titles)
    body = '\n'.join(f'<tr>{"".join(row)}</tr>' for row in cells)
    return f'<div class="card wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def svg(figure, caption):
    """
    A Figure as SVG, as wide as the page and with its text as text. Two figures in a page must not share an id.
    Therefore ids that are referred to depend on the caption, and the others are removed: maps without values would have
    the same.
    """
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({'svg.fonttype': 'none', 'svg.hashsalt': caption}):
        figure.savefig(text, format='svg', metadata=dict.fromkeys(('Creator', 'Date', 'Format', 'Type')))
    text = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', '', text.getvalue(), count=1)
    return re.sub(r' id="([\w.]+_\d+|image\w+)"', '', text[text.index('<svg') :])
