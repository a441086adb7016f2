//! Checks of calls that must fail, and say where they stand: of the tests named `places`.

use gpu_pool::{Device, Error, Group, Result};
use std::panic::Location;

/// The operation that an error names, and its place: file and line.
pub fn place(error: &Error) -> Option<(&'static str, String, u32)> {
    use Error::*;
    match error {
        InvalidArgument { op, site, .. }
        | WrongDevice { op, site, .. }
        | WrongPool { op, site, .. }
        | Borrowed { op, site, .. }
        | Poisoned { op, site, .. }
        | NestedScope { op, site }
        | KernelNotFound { op, site, .. }
        | GraphInvalidated { op, site, .. }
        | PeerDenied { op, site, .. }
        | NotFinite { op, site, .. }
        | DeviceLost { op, site: Some(site), .. } => Some((op, site.file().to_owned(), site.line())),
        OutOfMemory { op, report, .. } => {
            report.site.as_ref().map(|site| (*op, site.file.clone().into_owned(), site.line))
        }
        _ => None,
    }
}

/// The call has failed, and its error names it, and its line: that of this check, or one of the next where it stands
/// in several.
#[track_caller]
pub fn told<T>(name: &str, result: Result<T>) {
    let here = Location::caller();
    let Err(error) = result else { panic!("{name} at {here} has not failed") };
    let Some((op, file, line)) = place(&error) else { panic!("{name} at {here}: no place in {error}") };
    assert_eq!(file, here.file(), "{name}: {error}");
    assert!((here.line()..here.line() + 12).contains(&line), "{name} at {here}: {error}");
    assert_eq!(op.rsplit("::").next(), name.rsplit("::").next(), "{name}: {error}");
    assert!(error.to_string().contains(&format!("{file}:{line}")), "{name}: no place in the text: {error}");
}

/// The same call of a device and of a group.
macro_rules! both {
    ($dev:ident, $name:ident $(::<$Of:ty>)? ($($arg:expr),* $(,)?)) => {
        $crate::told::told(concat!("Device::", stringify!($name)), $dev.$name$(::<$Of>)?($($arg),*));
        $crate::told::told(concat!("Group::", stringify!($name)), $crate::told::group_of($dev).$name$(::<$Of>)?($($arg),*));
    };
}

pub fn group_of(dev: &Device) -> Group<'_> {
    dev.group(&(0..dev.count()).collect::<Vec<_>>()).unwrap()
}
pub(crate) use both;
