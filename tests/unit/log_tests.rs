use super::*;

#[test]
fn an_event_is_one_line_with_its_fields() {
    let none: &[(&str, &dyn fmt::Display)] = &[];
    assert_eq!(line("warn", format_args!("a {}", 1), none), "gpu-pool: warn: a 1\n");
    let fields: &[(&str, &dyn fmt::Display)] = &[("device", &3), ("why", &"none")];
    assert_eq!(line("error", format_args!("it ends"), fields), "gpu-pool: error: it ends (device=3, why=none)\n");
}

#[test]
fn levels_are_in_order_and_the_subscriber_of_the_thread_is_found() {
    assert_eq!(["off", "error", "warn", "info", "debug", "all", "WARN", ""].map(parse).iter().flatten().count(), 5);
    assert!(parse("error") < parse("warn") && LEVELS[DEFAULT] == "warn");
    assert!(LEVELS.iter().all(|level| EXPECTED.contains(level)));
    struct Any;
    impl tracing::Subscriber for Any {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            false
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {}
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }
    assert!(!has_subscriber());
    assert!(tracing::subscriber::with_default(Any, has_subscriber));
    assert!(!has_subscriber(), "that of another thread, or of an earlier time, gets no event of this one");
}
