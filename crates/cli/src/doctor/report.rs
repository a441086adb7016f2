//! The lines that `doctor` shows, for people and as JSON.

use gpu_pool::display_as;
use serde::Serialize;

/// How it stands with one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// It works, but a reader may want to know it.
    Note,
    /// Something does not work. The exit code is 1.
    Wrong,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    pub level: Level,
    pub topic: &'static str,
    pub text: String,
    /// The remedy. Lines that are not ok have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_do: Option<String>,
}

impl Line {
    pub fn ok(topic: &'static str, text: impl Into<String>) -> Self {
        Line { level: Level::Ok, topic, text: text.into(), to_do: None }
    }

    pub fn note(topic: &'static str, text: impl Into<String>, to_do: impl Into<String>) -> Self {
        Line { level: Level::Note, topic, text: text.into(), to_do: Some(to_do.into()) }
    }

    pub fn wrong(topic: &'static str, text: impl Into<String>, to_do: impl Into<String>) -> Self {
        Line { level: Level::Wrong, topic, text: text.into(), to_do: Some(to_do.into()) }
    }
}

display_as!(Line, |self, f| {
    let level = match self.level {
        Level::Ok => "ok",
        Level::Note => "note",
        Level::Wrong => "WRONG",
    };
    write!(f, "{level:<5}  {:<11}  {}", self.topic, self.text)?;
    self.to_do.as_ref().map_or(Ok(()), |to_do| write!(f, "\n{:20}-> {to_do}", ""))
});
