//! The look of all plots: font, colour of texts, and legend. Plots of examples and of `benches/collectives` include it.

use plotters::{
    coord::Shift,
    element::DynElement,
    prelude::*,
    style::{FontStyle, register_font},
};

/// The colour of texts and axes.
pub const INK: RGBColor = RGBColor(45, 52, 60);

/// Paul Tol's "bright" scheme: readable with any kind of colour vision. `benches/plots.py` has it, too.
pub const COLOURS: [RGBColor; 5] = [
    RGBColor(0x44, 0x77, 0xaa),
    RGBColor(0xee, 0x66, 0x77),
    RGBColor(0x22, 0x88, 0x33),
    RGBColor(0xaa, 0x33, 0x77),
    RGBColor(0xcc, 0xbb, 0x44),
];

/// Included, so that the picture does not depend on the machine's fonts (see `examples/data/README.md`).
static FONT: &[u8] = include_bytes!("../data/DejaVuSans-ascii.ttf");

/// Loads the font. Call it before drawing.
pub fn load_font() {
    register_font("sans-serif", FontStyle::Normal, FONT).map_err(|_| "the font is damaged").expect("it comes along");
}

/// Text of a size.
pub fn text(size: i32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}

/// The mark of a legend's entry, with its middle at `MIDDLE`, and the entry's name.
pub type Entry<B> = (DynElement<'static, B, (i32, i32)>, String);

/// The middle of a mark, in pixels of its cell.
pub const MIDDLE: (i32, i32) = (14, 10);

/// Draws a legend into an area of its own, in rows of `columns` entries.
pub fn legend<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    columns: usize,
    entries: Vec<Entry<B>>,
) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
    let cells = area.split_evenly((entries.len().div_ceil(columns), columns));
    for (cell, (mark, name)) in cells.iter().zip(entries) {
        cell.draw(&mark)?;
        cell.draw(&Text::new(name, (MIDDLE.0 + 20, MIDDLE.1 - 6), text(14)))?;
    }
    Ok(())
}
