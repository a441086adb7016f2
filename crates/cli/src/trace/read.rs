//! Reads the events of a Chrome trace: a JSON array whose end may be missing, since a killed program could not write
//! it, or an object with such an array (`traceEvents`).

use serde::Deserialize;

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

/// The events of a file's text, and whether the file is whole.
pub fn events(text: &str) -> Result<(Vec<Event>, bool), String> {
    #[derive(Deserialize)]
    struct Object {
        #[serde(rename = "traceEvents")]
        events: Vec<Event>,
    }
    let text = text.trim();
    if text.starts_with('{') {
        let object = serde_json::from_str::<Object>(text);
        return object.map(|object| (object.events, true)).map_err(|error| format!("no Chrome trace: {error}"));
    }
    let mut rest = text.strip_prefix('[').ok_or("no Chrome trace: a JSON array is expected")?;
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
            Some(Err(error)) => return Err(format!("event {}: {error}", events.len() + 1)),
            None => return Ok((events, false)),
        }
        rest = &rest[one.byte_offset()..];
    }
}
