//! The programs of the book's pages that need this crate are doctests.

/// Makes the Rust programs of each page doctests. `cargo test --doc book` runs them.
macro_rules! pages {
    ($($name:ident: $path:literal),+ $(,)?) => {
        $(#[doc = include_str!(concat!("../../../../", $path))] struct $name;)+
    };
}

pages! {
    Collectives: "docs/src/guide/collectives.md",
    Operations: "docs/src/guide/operations.md",
    DataParallel: "docs/src/guide/data_parallel.md",
    Tutorial: "docs/src/guide/tutorial.md",
    Checkpoints: "docs/src/guide/checkpoints.md",
    Pipelines: "docs/src/guide/pipelines.md",
    TensorParallel: "docs/src/guide/tensor_parallel.md",
}
