//! The programs of the README and of the book's pages are doctests. `docs/check.py` says which page is missing here.

/// Makes the Rust programs of each page doctests. `cargo test --doc book` runs them.
macro_rules! pages {
    ($($name:ident: $path:literal),+ $(,)?) => {
        $(#[doc = include_str!(concat!("../../", $path))] struct $name;)+
    };
}

pages! {
    Readme: "README.md",
    FirstProgram: "docs/src/guide/first_program.md",
    Pools: "docs/src/guide/pools.md",
    Shards: "docs/src/guide/shards.md",
    State: "docs/src/guide/state.md",
    Memory: "docs/src/guide/memory.md",
    MemoryPool: "docs/src/guide/memory_pool.md",
    Streams: "docs/src/guide/streams.md",
    Gradients: "docs/src/guide/gradients.md",
    Graphs: "docs/src/guide/graphs.md",
    Tasks: "docs/src/guide/tasks.md",
    Jobs: "docs/src/guide/jobs.md",
    Testing: "docs/src/guide/testing.md",
    Errors: "docs/src/guide/errors.md",
    Tuning: "docs/src/guide/tuning.md",
    Slow: "docs/src/guide/slow.md",
    Observe: "docs/src/guide/observe.md",
    Foreign: "docs/src/guide/foreign.md",
    Howto: "docs/src/guide/howto.md",
    Faq: "docs/src/guide/faq.md",
}
