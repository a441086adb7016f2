//! A call is wrong: its error names the function, and the call in the test's file.

use crate::support::{self, guarded};
use gpu_pool::{Builder, Device, DeviceBuffer, Error, Group, Result};
use parking_lot::Mutex;
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

pub fn group_of(dev: &Device) -> Group<'_> {
    dev.group(&(0..dev.count()).collect::<Vec<_>>()).unwrap()
}

/// Runs `f` on a device of such a pool, with a buffer of another pool.
pub fn on_one_of<F>(builder: Builder, f: F)
where
    F: Fn(&Device, &mut DeviceBuffer<f32>) -> Result<()> + Send + Sync + 'static,
{
    let pool = builder.host(1).memory_limit(4 << 20).build().unwrap();
    guarded(move || {
        let other = support::builder().host(1).build().unwrap();
        let far = Mutex::new(other.run(|dev, _| dev.zeros(4)).unwrap().remove(0));
        pool.run(|dev, _| f(dev, &mut far.lock())).unwrap();
    });
}
