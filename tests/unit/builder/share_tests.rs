//! What an environment or a program says about sharing GPUs.

use super::*;
use crate::Error;

#[test]
fn seats_are_counted_by_gpu() {
    let gpus = [1, 2, 1, 1, 2, 3].map(|gpu| [gpu; 16]);
    let seats = seats(gpus.into_iter()).into_iter().map(|seat| (seat.place, seat.sharers));
    assert_eq!(seats.collect::<Vec<_>>(), [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2), (0, 1)]);
}

#[test]
fn the_environment_says_how_often() {
    assert_eq!([parse("1"), parse("16")], [1, 16].map(|times| Some(Sharing::Times(times))));
    assert_eq!(["0", "17", "-1", "two", "2,2"].map(parse), [None; 5]);
    assert_eq!(
        [None, Some("8"), Some("x"), Some("31"), Some("32")].map(are_plenty),
        [false, false, false, false, true]
    );
}

#[test]
fn what_is_listed_is_opened_and_nothing_twice_unless_allowed() {
    let list = |sharing: Option<Sharing>, devices: Option<&[usize]>| {
        let builder = Builder { sharing, devices: devices.map(<[_]>::to_vec), ..Builder::default() };
        builder.ordinals(2, "GPUs", builder.shares()).and_then(|ordinals| builder.crowd(ordinals))
    };
    let (listed, times) = (Some(Sharing::Listed), |times| Some(Sharing::Times(times)));
    assert_eq!(list(times(3), None).unwrap(), [0, 1, 0, 1, 0, 1]);
    assert_eq!(list(times(2), Some(&[1])).unwrap(), [1, 1]);
    assert_eq!(list(times(1), Some(&[0, 0, 1])).unwrap(), [0, 0, 1]);
    assert_eq!(list(listed, Some(&[0, 0, 0, 1, 1])).unwrap(), [0, 0, 0, 1, 1]);
    assert_eq!(list(listed, None).unwrap(), [0, 1]);
    assert!(matches!(list(listed, Some(&[0, 2])), Err(Error::NoDevice { .. })));
    for sharing in [None, Some(Sharing::Never)] {
        let error = list(sharing, Some(&[0, 1, 0])).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument { why, .. } if why.contains("listed twice")), "{error}");
    }
    // The environment's bound on how many devices a GPU is holds for the program's list, too.
    assert_eq!(list(listed, Some(&[0; MOST])).unwrap().len(), MOST);
    for (sharing, devices) in [(listed, &[0; MOST + 1][..]), (times(MOST), &[0, 0])] {
        let error = list(sharing, Some(devices)).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument { why, .. } if why.contains("share_gpus")), "{error}");
    }
    // The program's word counts, also against the environment's.
    let builder = Builder::default().share_gpus(false).share_gpus(true);
    assert_eq!(builder.sharing, listed);
}
