//! The two pictures: the text of `Display`, and the SVG.

use super::{presets_tests::PRESETS, *};
use std::time::Duration;

#[test]
fn diagrams_have_a_row_for_each_rank() {
    let split = Schedule::zero_bubble(3, 1, 3).unwrap().to_string();
    assert_eq!(
        split,
        "\
rank 0 |0F0 0F1 0F2         0I0 0W0 0I1 0W1 0I2 0W2|
rank 1 |    1F0 1F1     1I0 1F2 1I1 1W0 1I2 1W1 1W2|
rank 2 |        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2|
3 ranks, 3 stages, 3 micro-batches; bubble 18.2 %; saved activations at most 3, 3, 3"
    );
    let one = Schedule::gpipe(1, 1).unwrap().to_string();
    assert_eq!(one, "rank 0 |0F0 0B0----|\n1 rank, 1 stage, 1 micro-batch; bubble 0.0 %; saved activations at most 1");
}

/// All rows of a diagram are equally long, and labels of several lengths keep the columns.
#[test]
fn diagrams_are_rectangles() {
    for preset in PRESETS {
        for (ranks, chunks, micros) in [(1, 1, 1), (4, 2, 8), (12, 1, 12), (3, 4, 12)] {
            let text = preset(ranks, chunks, micros).unwrap().to_string();
            let rows: Vec<_> = text.lines().take(ranks).collect();
            assert!(rows.iter().all(|row| row.len() == rows[0].len() && row.ends_with('|')), "{text}");
            assert_eq!(text.lines().count(), ranks + 1);
        }
    }
}

/// A rank is idle for longer than the widest field of a format string, which is 65,535 characters.
#[test]
fn diagrams_of_long_schedules() {
    let micros = 10_000;
    let forward = |stage, micro| Action { stage, work: Work::Forward, micro };
    let first = (0..micros).map(|micro| forward(0, micro)).collect();
    let second = (0..micros).rev().map(|micro| forward(1, micro)).collect();
    let text = Schedule::new(vec![first, second]).unwrap().to_string();
    assert_eq!(text.lines().nth(1).unwrap().find("1F9999"), Some("rank 1 |".len() + micros * "0F9999 ".len()));
}

/// The numbers of the attribute `name` in a tag.
fn attribute(tag: &str, name: &str) -> f64 {
    let start = tag.find(&format!(" {name}=\"")).unwrap() + name.len() + 3;
    tag[start..].split('"').next().unwrap().parse().unwrap()
}

/// The boxes: one for each action, inside the picture, side by side, each under its own rank.
#[test]
fn svg_has_a_box_for_each_action() {
    let uneven = Costs {
        forward: Duration::from_micros(50),
        backward_input: Duration::from_micros(70),
        backward_weights: Duration::from_micros(33),
        hop: Duration::from_micros(4),
    };
    for preset in PRESETS {
        for costs in [Costs::default(), uneven] {
            let timeline = preset(4, 2, 8).unwrap().simulate(costs).unwrap();
            let svg = timeline.to_svg();
            let (width, height) = (attribute(&svg, "width"), attribute(&svg, "height"));
            let boxes: Vec<_> = svg.lines().filter(|line| line.starts_with("<g><title>")).collect();
            assert_eq!(boxes.len(), timeline.spans.iter().flatten().count());
            assert_eq!(svg.matches("<g>").count(), svg.matches("</g>").count());
            assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
            let mut boxes = boxes.into_iter();
            let mut above = 0.0;
            for (rank, spans) in timeline.spans.iter().enumerate() {
                let mut end = 0.0;
                let mut row = None;
                for span in spans {
                    let tag = boxes.next().unwrap();
                    let title = format!("{}: rank {rank}, {:?} to {:?}", span.action, span.start, span.end);
                    assert!(tag.contains(&format!("<title>{title}</title>")), "{tag}");
                    let tag = &tag[tag.find("<rect").unwrap()..];
                    let (x, y) = (attribute(tag, "x"), attribute(tag, "y"));
                    assert!(x >= end - 0.02, "{tag}");
                    assert!(*row.get_or_insert(y) == y && y > above);
                    end = x + attribute(tag, "width");
                    assert!(end <= width && y + attribute(tag, "height") <= height);
                }
                above = row.unwrap();
            }
            // Where all actions have room, all have labels.
            let labels = svg.matches("text-anchor=\"middle\" ").count() + svg.matches("font-size=\"11\"").count();
            assert!(labels > 0);
        }
    }
}

#[test]
fn svg_has_ticks_at_round_times() {
    let part = Duration::from_millis(10);
    let costs = Costs { forward: part, backward_input: part, backward_weights: part, hop: Duration::ZERO };
    let svg = Schedule::one_f_one_b(4, 8).unwrap().simulate(costs).unwrap().to_svg();
    let ticks: Vec<_> = svg.lines().filter_map(|line| line.strip_suffix("ms</text>")?.rsplit('>').next()).collect();
    assert_eq!(ticks, ["50", "100", "150", "200", "250", "300"]);
}

/// Extreme times neither hang nor divide by zero.
#[test]
fn svg_of_extreme_times() {
    let schedule = Schedule::one_f_one_b(2, 2).unwrap();
    let long = Duration::MAX / 100;
    for costs in [
        Costs { hop: Duration::ZERO, forward: Duration::ZERO, backward_input: Duration::ZERO, ..Costs::ZERO },
        Costs { forward: Duration::from_nanos(1), ..Costs::ZERO },
        Costs { forward: long, ..Costs::ZERO },
        Costs { forward: Duration::from_nanos(1), hop: long, ..Costs::ZERO },
    ] {
        let svg = schedule.simulate(costs).unwrap().to_svg();
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert!(svg.len() < 20_000);
    }
    let nothing = Timeline { spans: Vec::new(), end: Duration::ZERO, bubble: 0.0, in_flight: Vec::new() };
    assert!(nothing.to_svg().starts_with("<svg "));
}
