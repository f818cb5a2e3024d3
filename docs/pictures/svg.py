"""
Writes SVG for the pictures of README.md and docs/: a few shapes, and colors for light and for dark pages.

    save('layouts', draw)      # draw(theme) returns a Drawing: assets/layouts_light.svg and assets/layouts_dark.svg

A drawing is 600 units wide, on anything from a phone (390 pixels) to a wide screen, so text of 20 units is small print.
Colors are Okabe and Ito's, which can be told apart with every kind of color blindness. There is no background, so
that of the page shows.
"""

import math
from collections import namedtuple
from html import escape
from pathlib import Path

ASSETS = Path(__file__).resolve().parent.parent.parent / 'assets'
WIDTH = 600
SMALL, LARGE = 20, 22  # of text
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"

# text and quiet: words; empty: boxes that hold nothing; line: axes. The rest are for what is drawn; where two things of
# one kind must be told apart, the second has the color whose name ends with 2.
Theme = namedtuple('Theme', 'name text quiet empty line blue orange green red pink sky blue2 orange2 green2')
LIGHT = Theme(
    'light', '#1f2328', '#59636e', '#e8ecf0', '#c4ccd4',
    '#0072b2', '#e69f00', '#009e73', '#d55e00', '#cc79a7', '#56b4e9', '#003f63', '#9a5b00', '#005a41',
)  # fmt: skip
DARK = Theme(
    'dark', '#e6edf3', '#9aa4af', '#23292f', '#3d444d',
    '#3c9fdc', '#e69f00', '#1fbb8c', '#f07b2a', '#d98fb9', '#7cc7f2', '#a9d9f7', '#ffd27a', '#9ff0d3',
)  # fmt: skip


def number(value):
    return f'{value:.2f}'.rstrip('0').rstrip('.')


class Drawing:
    """Shapes in the order in which they were added, the last one in front; y runs downwards."""

    def __init__(self, height, about, width=WIDTH):
        """about: the text for readers who cannot see the picture."""
        self.width, self.height, self.about, self.shapes = width, height, about, []

    def add(self, tag, inside='', **attributes):
        written = ' '.join(
            f'{key.replace("_", "-")}="{number(value) if isinstance(value, (int, float)) else value}"'
            for key, value in attributes.items()
        )
        self.shapes.append(f'<{tag} {written}>{inside}</{tag}>' if inside else f'<{tag} {written}/>')

    def text(self, x, y, words, fill, size=SMALL, anchor='start', bold=False):
        """anchor: which point of the words is at x: start, middle or end. y is their base line."""
        more = ({'text_anchor': anchor} if anchor != 'start' else {}) | ({'font_weight': 600} if bold else {})
        self.add('text', escape(words), x=x, y=y, fill=fill, font_size=size, **more)

    def box(self, x, y, width, height, fill, opacity=1, rx=0):
        more = ({'rx': rx} if rx else {}) | ({'opacity': opacity} if opacity < 1 else {})
        self.add('rect', x=x, y=y, width=width, height=height, fill=fill, **more)

    def boxes(self, rectangles, fill, opacity=1):
        """Several (x, y, width, height) as one shape."""
        path = ''.join(f'M{number(x)} {number(y)}h{number(w)}v{number(h)}h{number(-w)}z' for x, y, w, h in rectangles)
        if path:
            self.add('path', d=path, fill=fill, **({'opacity': opacity} if opacity < 1 else {}))

    def line(self, points, stroke, width=2, dashes=''):
        path = 'M' + 'L'.join(f'{number(x)} {number(y)}' for x, y in points)
        more = {'stroke_dasharray': dashes} if dashes else {}
        self.add('path', d=path, fill='none', stroke=stroke, stroke_width=width, stroke_linejoin='round', **more)

    def dot(self, x, y, radius, fill, stroke=None):
        more = {'stroke': stroke, 'stroke_width': 2.5} if stroke else {}
        self.add('circle', cx=x, cy=y, r=radius, fill=fill, **more)

    def svg(self):
        size = f'width="{number(1.2 * self.width)}" height="{number(1.2 * self.height)}"'
        size += f' viewBox="0 0 {number(self.width)} {number(self.height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img">'
        return '\n'.join([head, f'<title>{escape(self.about)}</title>', *self.shapes, '</svg>', ''])


def scale(first, last, begin, end, logarithmic=False):
    """A function that maps values from first to last to places from begin to end."""
    to = math.log10 if logarithmic else float
    return lambda value: begin + (to(value) - to(first)) / (to(last) - to(first)) * (end - begin)


def save(name, draw):
    for theme in (LIGHT, DARK):
        path = ASSETS / f'{name}_{theme.name}.svg'
        path.write_text(draw(theme).svg())
        print(path)
