//! Environment variables. Only this file reads them (`clippy.toml`): a value that is not text is an error everywhere,
//! and never counts as absent.

use std::{env, ffi::OsString};

/// A variable whose value is not UTF-8. Its text leaves the value out, which may be a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the value of {0} is not UTF-8")]
pub struct NotText(
    /// The name of the variable.
    pub String,
);

/// The value of a variable, as it is.
pub fn text(name: &str) -> Result<Option<String>, NotText> {
    os(name).map(OsString::into_string).transpose().map_err(|_| NotText(name.to_owned()))
}

/// The value of a variable that names a file, or that is only compared.
#[allow(clippy::disallowed_methods, reason = "the one reader")]
pub fn os(name: &str) -> Option<OsString> {
    env::var_os(name)
}

#[allow(clippy::disallowed_methods, reason = "the one reader")]
pub(crate) fn names() -> impl Iterator<Item = String> {
    env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned())
}
