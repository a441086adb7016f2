//! Timelines in the Chrome trace format, which <https://ui.perfetto.dev> and `chrome://tracing` open.
//!
//! Pipelines' timelines and traces of tasks write it. A row is a thread of a process in the format's words.

use serde_json::{Value, json};
use std::time::Duration;

/// The events of a file.
#[derive(Default)]
pub struct ChromeTrace(Vec<Value>);

/// Where an event is drawn.
#[derive(Clone, Copy)]
pub struct Row {
    /// The group of rows.
    pub process: usize,
    /// The row in it.
    pub thread: usize,
}

impl ChromeTrace {
    /// The name of a group of rows.
    pub fn name_process(&mut self, process: usize, name: &str) {
        self.0.push(json!({ "ph": "M", "name": "process_name", "pid": process, "args": { "name": name } }));
    }

    /// The name of a row.
    pub fn name_row(&mut self, Row { process, thread }: Row, name: &str) {
        let args = json!({ "name": name });
        self.0.push(json!({ "ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": args }));
    }

    /// A box in a row. Boxes of a row must not overlap in part.
    pub fn slice(&mut self, row: Row, name: &str, category: &str, (start, end): (Duration, Duration), args: Value) {
        let (start, length) = (micros(start), micros(end - start));
        self.0.push(json!({
            "ph": "X", "pid": row.process, "tid": row.thread, "ts": start, "dur": length,
            "name": name, "cat": category, "args": args,
        }));
    }

    /// An arrow between two boxes, each named by its row and its start.
    pub fn arrow(&mut self, from: (Row, Duration), to: (Row, Duration), name: &str, category: &str) {
        let id = self.0.len();
        for (phase, (row, at)) in [("s", from), ("f", to)] {
            self.0.push(json!({
                "ph": phase, "bp": "e", "id": id, "pid": row.process, "tid": row.thread, "ts": micros(at),
                "name": name, "cat": category,
            }));
        }
    }

    /// The file.
    pub fn finish(self) -> String {
        json!({ "traceEvents": self.0 }).to_string()
    }
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}
