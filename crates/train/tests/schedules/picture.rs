//! The two pictures: the text of `Display`, and the Chrome trace.

use super::presets::PRESETS;
use gpu_pool_train::*;
#[cfg(feature = "insight")]
use serde_json::Value;
#[cfg(feature = "insight")]
use std::time::Duration;

#[cfg(feature = "insight")]
const ZERO: Costs = Costs {
    forward: Duration::ZERO,
    backward_input: Duration::ZERO,
    backward_weights: Duration::ZERO,
    hop: Duration::ZERO,
};

#[test]
fn diagrams_have_a_row_for_each_rank() {
    let split = PipelineSchedule::zero_bubble(3, 1, 3).unwrap().to_string();
    assert_eq!(
        split,
        "\
rank 0 |0F0 0F1 0F2         0I0 0W0 0I1 0W1 0I2 0W2|
rank 1 |    1F0 1F1     1I0 1F2 1I1 1W0 1I2 1W1 1W2|
rank 2 |        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2|
3 ranks, 3 stages, 3 micro-batches; bubble 18.2 %; saved activations at most 3, 3, 3"
    );
    let one = PipelineSchedule::gpipe(1, 1).unwrap().to_string();
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
    let text = PipelineSchedule::new(vec![first, second]).unwrap().to_string();
    assert_eq!(text.lines().nth(1).unwrap().find("1F9999"), Some("rank 1 |".len() + micros * "0F9999 ".len()));
}

#[cfg(feature = "insight")]
fn name(work: Work) -> &'static str {
    match work {
        Work::Forward => "forward pass",
        Work::Backward => "backward pass",
        Work::BackwardInput => "gradient of the input",
        Work::BackwardWeights => "gradients of the weights",
    }
}

/// The boxes: one for each action, side by side, each in the row of its own rank.
#[cfg(feature = "insight")]
#[test]
fn a_trace_has_a_box_for_each_action() {
    let uneven = Costs {
        forward: Duration::from_micros(50),
        backward_input: Duration::from_micros(70),
        backward_weights: Duration::from_micros(33),
        hop: Duration::from_micros(4),
    };
    for preset in PRESETS {
        for costs in [Costs::default(), uneven] {
            let timeline = preset(4, 2, 8).unwrap().simulate(costs).unwrap();
            let trace: Value = serde_json::from_str(&timeline.to_chrome_trace()).unwrap();
            let events = trace["traceEvents"].as_array().unwrap();
            let boxes: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
            assert_eq!(boxes.len(), timeline.spans.iter().flatten().count());
            let mut boxes = boxes.into_iter();
            for (rank, spans) in timeline.spans.iter().enumerate() {
                let mut end = 0.0;
                for span in spans {
                    let found = boxes.next().unwrap();
                    assert_eq!(found["tid"], rank);
                    assert_eq!(found["name"], span.action.to_string());
                    assert_eq!(found["cat"], name(span.action.work));
                    let (start, length) = (found["ts"].as_f64().unwrap(), found["dur"].as_f64().unwrap());
                    assert!((start - span.start.as_secs_f64() * 1e6).abs() < 1e-6 && start >= end, "{found}");
                    end = start + length;
                    assert!((end - span.end.as_secs_f64() * 1e6).abs() < 1e-6, "{found}");
                }
            }
            let name = format!("rank 3, saves {}", timeline.in_flight[3]);
            assert!(events.iter().any(|event| event["ph"] == "M" && event["args"]["name"] == *name));
        }
    }
}

/// Extreme times neither overflow nor become what JSON cannot say.
#[cfg(feature = "insight")]
#[test]
fn traces_of_extreme_times() {
    let schedule = PipelineSchedule::one_f_one_b(2, 2).unwrap();
    let long = Duration::MAX / 100;
    for costs in [
        Costs { hop: Duration::ZERO, forward: Duration::ZERO, backward_input: Duration::ZERO, ..ZERO },
        Costs { forward: Duration::from_nanos(1), ..ZERO },
        Costs { forward: long, ..ZERO },
        Costs { forward: Duration::from_nanos(1), hop: long, ..ZERO },
    ] {
        let trace: Value = serde_json::from_str(&schedule.simulate(costs).unwrap().to_chrome_trace()).unwrap();
        let boxes = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X");
        assert!(boxes.clone().all(|event| event["ts"].is_f64() && event["dur"].is_f64()));
        assert_eq!(boxes.count(), 8);
    }
    let nothing = Timeline { spans: Vec::new(), end: Duration::ZERO, bubble: 0.0, in_flight: Vec::new() };
    assert_eq!(nothing.to_chrome_trace(), r#"{"traceEvents":[]}"#);
}
