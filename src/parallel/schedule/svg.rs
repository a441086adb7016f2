//! A [`Timeline`] as an SVG picture. Users open it in a browser or put it into a page; it needs no other file.

use super::{Span, Timeline, Work, diagram::count};
use std::{
    fmt::{self, Write},
    ops::RangeInclusive,
    time::Duration,
};

/// Of a letter of the labels in the boxes, in pixels.
const LETTER: f64 = 7.4;
/// Of the time axis, in pixels.
const WIDTH: RangeInclusive<f64> = 560.0..=3200.0;

impl Timeline {
    /// Draws the timeline as an SVG document: a row for each rank, time from left to right, a box for each action.
    ///
    /// The colour of a box tells the work, and its shade tells the stage: later stages of a rank are paler. A box has
    /// its action as a label where there is room, and always as a tooltip with its times. Beside each rank stands the
    /// most activations that it saves at once. The text has about 300 bytes for each action.
    ///
    /// ```
    /// use gpu_pool::parallel::{Costs, Schedule};
    ///
    /// let timeline = Schedule::zero_bubble(4, 1, 8)?.simulate(Costs::default())?;
    /// let svg = timeline.to_svg(); // std::fs::write("zero_bubble.svg", &svg)
    /// assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    /// assert!(svg.contains("<title>3I2: rank 3, 8ms to 9ms</title>"));
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    pub fn to_svg(&self) -> String {
        let ranks = count(self.spans.len(), "rank");
        let title = format!("{ranks}, {:?}, bubble {:.1} %", self.end, 100.0 * self.bubble);
        let chart = self.chart();
        chart.picture(&title, self.spans.len(), |svg| {
            self.legend(svg)?;
            chart.axis(svg, self.spans.len())?;
            self.spans.iter().enumerate().try_for_each(|(rank, spans)| self.row(svg, &chart, rank, spans))
        })
    }

    /// Wide enough for the labels of the shortest boxes, within [`WIDTH`].
    fn chart(&self) -> Chart {
        let all = || self.spans.iter().flatten();
        let letters = all().map(|span| span.action.to_string().len()).max().unwrap_or(0);
        let lengths = all().map(|span| (span.end - span.start).as_secs_f64()).filter(|&length| length > 0.0);
        let shortest = lengths.fold(f64::INFINITY, f64::min);
        let wanted = LETTER * (letters + 1) as f64 * self.end.as_secs_f64() / shortest;
        let width = wanted.clamp(*WIDTH.start(), *WIDTH.end());
        Chart { left: 72.0, top: 64.0, row: 30.0, gap: 6.0, letter: LETTER, end: self.end, width }
    }

    fn legend(&self, svg: &mut String) -> fmt::Result {
        let mut x = 12.0;
        for work in [Work::Forward, Work::Backward, Work::BackwardInput, Work::BackwardWeights] {
            if self.spans.iter().flatten().any(|span| span.action.work == work) {
                let (fill, letter, name) = (color(work), work.letter(), work.name());
                writeln!(svg, "<rect x=\"{x}\" y=\"34\" width=\"14\" height=\"14\" fill=\"{fill}\"/>")?;
                writeln!(svg, "<text x=\"{}\" y=\"46\">{letter} {name}</text>", x + 20.0)?;
                x += 40.0 + 7.0 * (name.len() + 2) as f64;
            }
        }
        Ok(())
    }

    fn row(&self, svg: &mut String, chart: &Chart, rank: usize, spans: &[Span]) -> fmt::Result {
        let (left, y, width, height) = (chart.left, chart.y(rank), chart.width, chart.row);
        let mut stages: Vec<usize> = spans.iter().map(|span| span.action.stage).collect();
        stages.sort_unstable();
        stages.dedup();
        let kept = self.in_flight.get(rank).copied().unwrap_or(0);
        writeln!(svg, "<text x=\"12\" y=\"{}\">rank {rank}</text>", y + 13.0)?;
        writeln!(svg, "<text x=\"12\" y=\"{}\" font-size=\"10\" fill=\"#666\">saves {kept}</text>", y + 26.0)?;
        writeln!(svg, "<rect x=\"{left}\" y=\"{y}\" width=\"{width:.2}\" height=\"{height}\" fill=\"#f2f2f2\"/>")?;
        for Span { action, start, end } in spans {
            let (x, width) = (chart.x(*start), chart.x(*end) - chart.x(*start));
            let chunk = stages.binary_search(&action.stage).unwrap_or(0) as f64 / stages.len() as f64;
            let (fill, opacity) = (color(action.work), 1.0 - 0.6 * chunk);
            let paint = format!("fill=\"{fill}\" fill-opacity=\"{opacity:.2}\"");
            let title = format!("{action}: rank {rank}, {start:?} to {end:?}");
            chart.bar(svg, (x, y, width), &title, &action.to_string(), &paint)?;
        }
        Ok(())
    }
}

/// Rows of bars over time: where they lie, in pixels.
pub(in crate::parallel) struct Chart {
    pub left: f64,
    pub top: f64,
    /// The height of a row.
    pub row: f64,
    /// Between two rows.
    pub gap: f64,
    /// The width of a letter of the labels in the bars, which are 11 pixels high.
    pub letter: f64,
    /// The end of the time axis.
    pub end: Duration,
    /// Of the time axis.
    pub width: f64,
}

impl Chart {
    /// A picture with room for so many rows; `draw` draws the axis and the rows.
    pub fn picture(&self, title: &str, rows: usize, draw: impl FnOnce(&mut String) -> fmt::Result) -> String {
        let (width, height) = (self.left + self.width + 24.0, self.y(rows) + 44.0);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
             <text x=\"12\" y=\"22\" font-size=\"14\">{title}</text>\n"
        );
        // Writing to a string cannot fail.
        let _ = draw(&mut svg);
        svg.push_str("</svg>\n");
        svg
    }

    pub fn x(&self, time: Duration) -> f64 {
        match self.end.as_secs_f64() {
            0.0 => self.left,
            end => self.left + self.width * time.as_secs_f64() / end,
        }
    }

    /// The top of a row.
    pub fn y(&self, row: usize) -> f64 {
        self.top + row as f64 * (self.row + self.gap)
    }

    /// A bar with a tooltip, and with its label where there is room.
    pub fn bar(
        &self,
        svg: &mut String,
        (x, y, width): (f64, f64, f64),
        title: &str,
        label: &str,
        paint: &str,
    ) -> fmt::Result {
        let height = self.row;
        writeln!(
            svg,
            "<g><title>{title}</title><rect x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"{height}\" \
             {paint} stroke=\"#fff\"/>"
        )?;
        if self.letter * label.len() as f64 <= width {
            let (x, y) = (x + width / 2.0, y + height / 2.0 + 4.0);
            writeln!(svg, "<text x=\"{x:.2}\" y=\"{y}\" font-size=\"11\" text-anchor=\"middle\">{label}</text>")?;
        }
        writeln!(svg, "</g>")
    }

    /// Below so many rows, a line with ticks at round times, at least 70 pixels from each other.
    pub fn axis(&self, svg: &mut String, rows: usize) -> fmt::Result {
        let (left, right, y) = (self.left, self.left + self.width, self.y(rows));
        writeln!(svg, "<path d=\"M{left} {y}H{right:.2}\" stroke=\"#888\"/>")?;
        let ticks = (self.width / 70.0).floor();
        let least = (self.end.as_nanos() as f64 / ticks).ceil() as u128;
        let step = round_up(least);
        let mut nanos = 0;
        while nanos <= self.end.as_nanos() && nanos <= u128::from(u64::MAX) {
            // Later times than 584 years have no tick.
            let time = Duration::from_nanos(nanos as u64);
            let x = self.x(time);
            writeln!(svg, "<path d=\"M{x:.2} {y}v6\" stroke=\"#888\"/>")?;
            writeln!(svg, "<text x=\"{x:.2}\" y=\"{}\" text-anchor=\"middle\">{time:?}</text>", y + 20.0)?;
            nanos += step;
        }
        Ok(())
    }
}

/// The first of 1, 2, 5, 10, 20, 50 .. that is at least `least`.
fn round_up(least: u128) -> u128 {
    let mut power = 1;
    loop {
        if let Some(step) = [1, 2, 5].map(|digit| digit * power).into_iter().find(|&step| step >= least) {
            return step;
        }
        power *= 10;
    }
}

/// Distinct for people who see fewer colours: they differ in brightness, too.
fn color(work: Work) -> &'static str {
    match work {
        Work::Forward => "#7fb3e6",
        Work::Backward => "#f4a259",
        Work::BackwardInput => "#f7c873",
        Work::BackwardWeights => "#8cc084",
    }
}
