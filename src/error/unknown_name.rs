//! The error of names in texts. Settings with `FromStr` return it.

/// A text names no [`Backend`](crate::Backend), [`Algorithm`](crate::collective::Algorithm) or
/// [`BackingChoice`](crate::memory::BackingChoice). It displays the text and the names that there are.
///
/// ```
/// # use gpu_pool::Backend;
/// let error = "gpu".parse::<Backend>().unwrap_err();
/// assert_eq!(error.to_string(), r#""gpu" is no backend: cuda, host or host:8"#);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no {kind}: {names}")]
pub struct UnknownName {
    text: String,
    kind: &'static str,
    names: &'static str,
}

impl UnknownName {
    pub(crate) fn new(text: &str, kind: &'static str, names: &'static str) -> Self {
        UnknownName { text: text.to_owned(), kind, names }
    }
}
