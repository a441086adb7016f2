//! `collectives!`: one text for a public method of both [`Device`](crate::Device) and [`Group`](super::Group).
//! Invariant: a body is compiled once, for `Group`; `Device` calls it for the group of all devices of the scope.

/// Stamps methods onto `Device` and `Group`. Both get the documentation; only `Device` gets the example, so that it is
/// tested once. `errors` is for all methods, and `fails` adds what one method has besides.
macro_rules! collectives {
    (
        $(#[$about:meta])*
        errors $errors:literal;
        $(
            $(#[$doc:meta])*
            $(example { $(#[$example:meta])* })?
            $(fails $fails:literal;)?
            fn $name:ident $(<$($Of:ident $(: $Bound:path)?),+>)?
                (&$this:ident $(, $arg:ident: $Arg:ty)* $(,)?) -> $Out:ty
            $(where [$($bounds:tt)*])?
            $body:block
        )+
    ) => {
        $(#[$about])*
        impl $crate::Device {
            $(
                $(#[$doc])*
                ///
                /// The members are all devices of the scope.
                ///
                $($(#[$example])*)?
                ///
                /// # Errors
                #[doc = $errors]
                $(#[doc = $fails])?
                #[track_caller]
                pub fn $name $(<$($Of $(: $Bound)?),+>)? (&$this $(, $arg: $Arg)*) -> $Out $(where $($bounds)*)? {
                    $this.everyone().$name($($arg),*)
                }
            )+
        }

        $(#[$about])*
        ///
        /// In these methods of a group, ranks and parts go by the order of the group.
        impl $crate::Group<'_> {
            $(
                $(#[$doc])*
                ///
                #[doc = concat!(
                    " The members are the devices of the group; [`Device::", stringify!($name), "`](crate::Device::",
                    stringify!($name), ")"
                )]
                /// is for all devices of the scope.
                ///
                /// # Errors
                #[doc = $errors]
                $(#[doc = $fails])?
                #[track_caller]
                pub fn $name $(<$($Of $(: $Bound)?),+>)? (&$this $(, $arg: $Arg)*) -> $Out $(where $($bounds)*)? {
                    let _here = $crate::error::op_site::OpSite::here(stringify!($name));
                    $body
                }
            )+
        }
    };
}
pub(crate) use collectives;
