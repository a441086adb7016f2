//! What stays on its device's thread, and what the compiler says to who sends it elsewhere.
//!
//! Such types hold `Rc`s, so they are neither `Send` nor `Sync` anyway. But rustc then reports each of these private
//! fields, with the way to it: a hundred lines, none of which names the rule. With an implementation whose condition
//! never holds, it reports the condition, once, in our words.

/// Nothing implements it, and nobody else can: the module is private. Where a value is returned, rustc says in words of
/// its own that it cannot be sent, and names this trait: hence its name.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is `DeviceThreadOnly`: it can neither be sent to another thread nor be shared with one",
    label = "this takes a `{Self}` away from its device's thread",
    note = "work on a device is done in the closures of `GpuPool::run` and its like, which run on the device's thread",
    note = "to keep a value there between scopes: `GpuPool::per_device`"
)]
pub trait NotDeviceThreadOnly {}

/// Makes types `!Send` and `!Sync`, with a message of our own.
macro_rules! device_thread_only {
    ($([$($generics:tt)*] $type:ty),+ $(,)?) => {$(
        // SAFETY: nothing implements the trait, so the condition never holds, and this implements nothing. (The
        // lifetime keeps rustc from finding that out at once, which it would refuse.)
        #[doc(hidden)]
        unsafe impl<$($generics)*> Send for $type where for<'never> $type: $crate::sync::NotDeviceThreadOnly {}
        // SAFETY: as above.
        #[doc(hidden)]
        unsafe impl<$($generics)*> Sync for $type where for<'never> $type: $crate::sync::NotDeviceThreadOnly {}
    )+};
}

pub(crate) use device_thread_only;
