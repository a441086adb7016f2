//! Frames: what is written is read again; whatever else is read is an error, without a panic and without much memory.

use super::*;
use crate::texts;
use proptest::prelude::*;

fn call() -> impl Strategy<Value = Box<Call>> {
    (any::<Member>(), ".{0,20}", ".{0,20}").prop_map(|(place, call, site)| Box::new(Call { place, call, site }))
}

fn failure() -> impl Strategy<Value = Failure> {
    prop_oneof![
        (any::<u32>(), any::<Option<u32>>(), ".*").prop_map(|(host, device, cause)| Failure::Aborted {
            host,
            device,
            cause
        }),
        (".*", any::<Duration>(), any::<Vec<u32>>()).prop_map(|(op, waited, missing)| Failure::Timeout {
            op,
            waited,
            missing
        }),
        (prop::sample::select(&[Kind::Call, Kind::Group, Kind::Participation][..]), call(), call())
            .prop_map(|(kind, a, b)| Failure::Mismatch { kind, a, b }),
        (any::<u32>(), ".*").prop_map(|(host, why)| Failure::Lost { host, why }),
        ".*".prop_map(|why| Failure::Refused { why }),
    ]
}

fn to_host() -> impl Strategy<Value = ToHost> {
    prop_oneof![
        (any::<u64>(), failure()).prop_map(|(scope, failure)| ToHost::Failed { scope, failure }),
        (any::<u64>(), any::<u64>(), any::<Notes>(), any::<bool>())
            .prop_map(|(arrival, known, notes, more)| ToHost::Commit { arrival, known, notes, more }),
        any::<u64>().prop_map(|arrival| ToHost::Dropped { arrival }),
        failure().prop_map(|failure| ToHost::Over { failure }),
    ]
}

fn to_hub() -> impl Strategy<Value = ToHub> {
    let arrive = (any::<u64>(), any::<Vec<Member>>(), any::<u32>(), any::<bool>(), ".{0,40}", any::<Vec<u8>>());
    prop_oneof![
        (".*", any::<Vec<u8>>()).prop_map(|(key, value)| ToHub::Set { key, value }),
        arrive.prop_map(|(number, members, device, proxied, call, note)| {
            let (site, members, call) = ("src/main.rs:1:1".into(), members.into(), call.into());
            let (arrival, scope, known, behind) =
                (number, number, NonZeroU64::new(number), NonZeroU64::new(number / 2));
            ToHub::Arrive(Arrive { arrival, scope, members, number, device, known, behind, proxied, call, site, note })
        }),
        any::<Vec<(u64, u64)>>().prop_map(|progress| ToHub::Beat { progress }),
        (any::<u64>(), any::<Option<u32>>(), ".*").prop_map(|(scope, device, cause)| ToHub::Fail {
            scope,
            device,
            cause
        }),
    ]
}

#[test]
fn no_frame_is_larger_than_the_limit() {
    let value = |len: usize| ToHub::Set { key: String::new(), value: vec![1; len] };
    assert_eq!(write(&mut Vec::new(), &value(MOST)).unwrap_err().kind(), ErrorKind::InvalidInput);
    // A length of 4 GB: nothing is read or allocated.
    let mut huge = &[255u8; 8][..];
    assert_eq!(read::<ToHub>(&mut huge, MOST).unwrap_err().kind(), ErrorKind::InvalidData);
    assert_eq!(huge.len(), 4);
    // The largest that a user can ask for fits.
    write(&mut Vec::new(), &value(MOST_VALUE)).unwrap();
    let text = "x".repeat(MOST_TEXT);
    let arrive = Arrive {
        arrival: u64::MAX,
        scope: u64::MAX,
        members: vec![(u32::MAX, u32::MAX); MOST_MEMBERS].into(),
        number: u64::MAX,
        device: u32::MAX,
        known: Some(NonZeroU64::MAX),
        behind: Some(NonZeroU64::MAX),
        proxied: true,
        call: text.as_str().into(),
        site: text.into(),
        note: vec![255; crate::traits::MOST_NOTE],
    };
    write(&mut Vec::new(), &ToHub::Arrive(arrive)).unwrap();
}

#[test]
fn long_texts_are_cut_between_letters() {
    assert_eq!(cut("short".to_owned()), "short");
    let long = cut("ä".repeat(MOST_TEXT));
    assert!(long.len() <= MOST_TEXT && long.len() >= MOST_TEXT - 1 && long.chars().all(|c| c == 'ä'));
}

proptest! {
    #![proptest_config(texts::cases(256))]

    #[test]
    fn what_is_written_is_read(to_hub in to_hub(), to_host in to_host()) {
        prop_assume!(postcard::to_allocvec(&to_hub).unwrap().len() < MOST);
        let mut bytes = Vec::new();
        write(&mut bytes, &to_hub).unwrap();
        write(&mut bytes, &to_host).unwrap();
        let mut from = &bytes[..];
        prop_assert_eq!(read::<ToHub>(&mut from, MOST).unwrap(), to_hub);
        prop_assert_eq!(read::<ToHost>(&mut from, MOST).unwrap(), to_host);
        prop_assert!(from.is_empty());
    }

    /// Any bytes, also a frame with changes, are a frame or an error.
    #[test]
    fn any_bytes_are_a_frame_or_an_error(
        bytes: Vec<u8>,
        to_hub in to_hub(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        end: prop::sample::Index,
    ) {
        let mut frame = postcard::to_allocvec(&to_hub).unwrap();
        for (at, value) in changes {
            let at = at.index(frame.len());
            frame[at] = value;
        }
        frame.truncate(end.index(frame.len() + 1));
        for bytes in [&bytes, &frame] {
            let _ = (decode::<ToHub>(bytes), decode::<ToHost>(bytes), read::<ToHub>(&mut &bytes[..], MOST));
        }
    }
}
