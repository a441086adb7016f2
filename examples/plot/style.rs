//! The look of all plots: font, colour of texts, and legend. Plots of examples and of `benches/collectives` include it.

use plotters::{
    coord::CoordTranslate,
    prelude::*,
    style::{FontStyle, register_font},
};

/// The colour of texts and axes.
pub const INK: RGBColor = RGBColor(45, 52, 60);

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

/// Draws the legend.
pub fn legend<'a, B: DrawingBackend + 'a, C: CoordTranslate>(
    chart: &mut ChartContext<'a, B, C>,
    position: SeriesLabelPosition,
    margin: u32,
    size: i32,
) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
    let mut labels = chart.configure_series_labels();
    labels.position(position).margin(margin).label_font(text(size));
    labels.background_style(WHITE.mix(0.9)).border_style(INK.mix(0.25)).draw()
}
