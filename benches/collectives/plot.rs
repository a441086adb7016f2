//! A sweep as a picture: time on the left, bus bandwidth on the right.

#[path = "../../examples/plot/style.rs"]
mod style;

use std::{error::Error, fs, path::Path};

use plotters::{coord::Shift, prelude::*};

use crate::{
    stage::Who,
    sweep::{Curve, Point},
};
use style::{COLOURS, INK, MIDDLE, legend, load_font, text};

type Drawn = Result<(), Box<dyn Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const SIZE: (u32, u32) = (1280, 620);

/// Draws the curve into `folder`, as `all_reduce_f32_8.svg`.
pub fn draw(folder: &Path, curve: &Curve) {
    let path = folder.join(format!("{}.svg", curve.name().replace('/', "_")));
    let mut svg = String::new();
    load_font();
    let drawn = picture(&SVGBackend::with_string(&mut svg, SIZE).into_drawing_area(), curve);
    drawn.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(&path, svg));
    written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// A side: its name, its colour, sizes and median microseconds.
type Line = (String, RGBColor, Vec<(usize, f64)>);

/// The sides with results.
fn lines(curve: &Curve) -> Vec<Line> {
    let peer = curve.peer.unwrap_or_default();
    let times = |of: &dyn Fn(&Point) -> Option<f64>| {
        curve.points.iter().filter_map(|point| Some((point.bytes, of(point)?))).collect::<Vec<_>>()
    };
    let ours = ("gpu-pool".to_owned(), COLOURS[0], times(&|point| Some(point.ours.median())));
    let theirs = Who::NCCL
        .into_iter()
        .zip(COLOURS.into_iter().skip(1))
        .map(|(who, colour)| (format!("{peer}, {}", who.way()), colour, times(&|point| point.theirs(who))));
    let lines = std::iter::once(ours).chain(theirs);
    lines.filter(|(_, _, points)| !points.is_empty()).collect()
}

fn picture(area: &Area<'_>, curve: &Curve) -> Drawn {
    area.fill(&WHITE)?;
    let name = curve.op.name().replace('_', "-");
    let title = format!("{name} of {} on {} devices, multicast off", curve.dtype, curve.world);
    let area = area.margin(12, 4, 4, 4).titled(&title, text(22))?;
    let (charts, below) = area.split_vertically(SIZE.1 - 90);
    let (left, right) = charts.split_horizontally(SIZE.0 / 2);
    // Both axes are logarithmic: the drawn values are logarithms to base 2, so that the ticks fall on powers of two.
    panel(
        &left,
        curve,
        "time of one operation, us",
        |_, micros| micros.log2(),
        |log| format!("{}", round(log.exp2())),
    )?;
    panel(&right, curve, "bus bandwidth, GB/s", |bytes, micros| curve.bus(bytes, micros), |y| format!("{y:.0}"))?;
    let ends = [(MIDDLE.0 - 11, MIDDLE.1), (MIDDLE.0 + 11, MIDDLE.1)];
    let entry = |(name, colour, _): Line| (PathElement::new(ends, colour.stroke_width(3)).into_dyn(), name);
    legend(&below.margin(4, 4, 92, 14), 3, lines(curve).into_iter().map(entry).collect())?;
    area.present()?;
    Ok(())
}

fn panel(
    area: &Area<'_>,
    curve: &Curve,
    title: &str,
    height: impl Fn(usize, f64) -> f64,
    mark: impl Fn(f64) -> String,
) -> Drawn {
    let lines = lines(curve);
    let heights = lines.iter().flat_map(|(_, _, points)| points).map(|&(bytes, micros)| height(bytes, micros));
    let (low, high) = heights.fold((0.0f64, 1.0f64), |(low, high), y| (low.min(y), high.max(y)));
    let sizes = || curve.points.iter().map(|point| (point.bytes as f64).log2());
    let (first, last) = (sizes().fold(f64::MAX, f64::min), sizes().fold(f64::MIN, f64::max));
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .x_label_area_size(50)
        .y_label_area_size(78)
        .build_cartesian_2d(first - 0.2..last + 0.3, low.floor()..high.ceil())?;
    let mark = |y: &f64| mark(*y);
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("bytes").y_desc(title).label_style(text(15)).axis_desc_style(text(16)).axis_style(INK.mix(0.6));
    mesh.bold_line_style(INK.mix(0.12)).light_line_style(TRANSPARENT);
    mesh.x_labels(8).x_label_formatter(&|log| size_mark(*log)).y_labels(10).y_label_formatter(&mark);
    mesh.draw()?;
    for (_, colour, points) in lines {
        let line: Vec<_> = points.iter().map(|&(n, micros)| ((n as f64).log2(), height(n, micros))).collect();
        chart.draw_series(LineSeries::new(line.iter().copied(), colour.stroke_width(2)))?;
        chart.draw_series(line.into_iter().map(|point| Circle::new(point, 3, colour.filled())))?;
    }
    Ok(())
}

/// Rounded, with one digit if it is small.
fn round(x: f64) -> f64 {
    if x < 10.0 { (10.0 * x).round() / 10.0 } else { x.round() }
}

/// `64K` at whole powers of two, nothing between them.
fn size_mark(log: f64) -> String {
    if (log - log.round()).abs() > 1e-6 {
        return String::new();
    }
    let (bytes, units) = (1u64 << log.round() as u32, ["", "K", "M", "G"]);
    let unit = (bytes.ilog2() / 10).min(3) as usize;
    format!("{}{}", bytes >> (10 * unit), units[unit])
}
