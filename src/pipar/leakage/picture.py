"""The rebuilt images as one picture: a row per image, with the original and then one column per cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipar.leakage.table import CutLeakage, LeakageTable

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont
    from torch import Tensor

    Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

#: Maximum number of rows per attack.
MAX_SHOWN = 4
_LEAST_SIDE = 72
_GAP = 6
_LINE = 16
_TEXT_SIZE = 12
_INK, _PAPER = (20, 20, 20), (255, 255, 255)


def can_be_drawn(table: LeakageTable) -> bool:
    """Return whether the samples are grey or colour images."""
    return len(table.input_shape) == 3 and table.input_shape[0] in (1, 3)


def draw(table: LeakageTable, originals: Tensor, pictures: Mapping[tuple[int, str], Tensor]) -> Image.Image:
    """Return the picture: for each attack its description and rows of images, each column with its correlation."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(_TEXT_SIZE)
    shown = originals[:MAX_SHOWN]
    sheet = _Sheet(table, len(shown))
    canvas = Image.new("RGB", sheet.size(font), _PAPER)
    drawing = ImageDraw.Draw(canvas)
    _write(drawing, font, (_GAP, _GAP), f"{table.subject}; weights: {table.weights}")
    for block, name in enumerate(table.attacks):
        top = sheet.top(block)
        _write(drawing, font, (_GAP, top), f"{name}: {table.attacks[name]}")
        columns = [shown, *(pictures[cut.split_point, name][:MAX_SHOWN] for cut in table.cuts)]
        titles = ["original", *(_title(cut, name) for cut in table.cuts)]
        for column, (images, title) in enumerate(zip(columns, titles, strict=True)):
            left = _GAP + column * (sheet.side + _GAP)
            _write(drawing, font, (left, top + _LINE), title)
            for row, image in enumerate(images):
                at = top + 2 * _LINE + row * (sheet.side + _GAP)
                canvas.paste(_image(image, sheet.side), (left, at))
    return canvas


class _Sheet:
    """The layout of the picture."""

    def __init__(self, table: LeakageTable, rows: int) -> None:
        largest = max(table.input_shape[1:])
        self.side = largest * -(-_LEAST_SIDE // largest)  # a whole multiple, so that pixels stay square
        self._rows = rows
        self._table = table

    def size(self, font: Font) -> tuple[int, int]:
        """Return width and height; they fit all columns and the longest line of text."""
        table = self._table
        lines = [f"{table.subject}; weights: {table.weights}", *(f"{name}: {w}" for name, w in table.attacks.items())]
        wide = max((1 + len(table.cuts)) * (self.side + _GAP), *(int(font.getlength(line)) for line in lines))
        return wide + 2 * _GAP, self.top(len(table.attacks))

    def top(self, block: int) -> int:
        """Return the top of an attack's rows."""
        return 2 * _GAP + _LINE + block * (2 * _LINE + self._rows * (self.side + _GAP) + _GAP)


def _title(cut: CutLeakage, attack: str) -> str:
    return f"P={cut.split_point}: {cut.attacks[attack].pixel_correlation:.2f}"


def _write(drawing: ImageDraw.ImageDraw, font: Font, at: tuple[int, int], words: str) -> None:
    drawing.text(at, words, fill=_INK, font=font)


def _image(pixels: Tensor, side: int) -> Image.Image:
    """Return pixels from 0 to 1 as a square image, enlarged without interpolation."""
    from PIL import Image

    values = (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    made = Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values)
    return made.convert("RGB").resize((side, side), Image.Resampling.NEAREST)
