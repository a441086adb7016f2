//! The programs of the book's pages that need this crate are doctests.

/// Makes the Rust programs of each page doctests. `cargo test --doc book` runs them.
macro_rules! pages {
    ($($name:ident: $path:literal),+ $(,)?) => {
        $(#[doc = include_str!(concat!("../../../../", $path))] struct $name;)+
    };
}

pages! {
    Cluster: "docs/src/guide/cluster.md",
    Ipc: "docs/src/guide/ipc.md",
}
