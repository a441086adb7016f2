//! Reads a file, and tells its kind by its content. A Chrome trace is a JSON array whose end may be missing, since a
//! killed program could not write it, or an object with such an array (`traceEvents`). A flight record is an object
//! with its version (`gpu_pool_flight_record`).

use super::flight::Record;
use serde::Deserialize;

pub enum Content {
    /// The events, and whether the file is whole.
    Trace(Vec<Event>, bool),
    Record(Record),
}

#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    #[error("no Chrome trace, and no flight record in JSON")]
    Kind,
    #[error("a flight record of version {0}; this program reads version 1")]
    Version(u64),
    #[error("the file is cut off")]
    Cut,
    #[error("event {0}: {1}")]
    Event(usize, serde_json::Error),
    #[error("no Chrome trace, and no flight record: {0}")]
    Json(serde_json::Error),
}

/// An event, as far as the summary needs it. Unknown fields are left out.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Event {
    /// `X` for a slice, `M` for a name.
    pub ph: String,
    pub name: String,
    /// The kind of a slice.
    pub cat: String,
    pub pid: u64,
    pub tid: u64,
    /// Microseconds.
    pub ts: f64,
    /// Microseconds.
    pub dur: f64,
    pub args: Arguments,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Arguments {
    /// Of a row.
    pub name: Option<String>,
    /// The call, and its place in the program.
    pub op: Option<String>,
    pub place: Option<String>,
    /// Of a wait.
    pub cause: Option<String>,
}

pub fn content(text: &str) -> Result<Content, Unreadable> {
    #[derive(Deserialize)]
    struct Object {
        gpu_pool_flight_record: Option<u64>,
        #[serde(rename = "traceEvents")]
        events: Option<Vec<Event>>,
    }
    let text = text.trim();
    if !text.starts_with('{') {
        return events(text).map(|(events, whole)| Content::Trace(events, whole));
    }
    let wrong = |error: serde_json::Error| if error.is_eof() { Unreadable::Cut } else { Unreadable::Json(error) };
    let object: Object = serde_json::from_str(text).map_err(wrong)?;
    match (object.gpu_pool_flight_record, object.events) {
        (Some(1), _) => serde_json::from_str(text).map(Content::Record).map_err(wrong),
        (Some(version), _) => Err(Unreadable::Version(version)),
        (None, Some(events)) => Ok(Content::Trace(events, true)),
        (None, None) => Err(Unreadable::Kind),
    }
}

fn events(text: &str) -> Result<(Vec<Event>, bool), Unreadable> {
    let mut rest = text.strip_prefix('[').ok_or(Unreadable::Kind)?;
    let mut events = Vec::new();
    loop {
        rest = rest.trim_start_matches([',', ' ', '\n', '\r', '\t']);
        if rest.is_empty() || rest.starts_with(']') {
            return Ok((events, !rest.is_empty()));
        }
        let mut one = serde_json::Deserializer::from_str(rest).into_iter();
        match one.next() {
            Some(Ok(event)) => events.push(event),
            // The last line was cut off.
            Some(Err(error)) if error.is_eof() => return Ok((events, false)),
            Some(Err(error)) => return Err(Unreadable::Event(events.len() + 1, error)),
            None => return Ok((events, false)),
        }
        rest = &rest[one.byte_offset()..];
    }
}
