use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn parsed(write: impl FnOnce(&mut Lines)) -> Value {
    let mut lines = Lines { text: Vec::new(), process: 3 };
    write(&mut lines);
    let text = String::from_utf8(lines.text).unwrap();
    // One line for each event, so that a file that ends anywhere has whole lines.
    assert!(text.ends_with("},\n") && text.lines().all(|line| line.starts_with('{')), "{text:?}");
    serde_json::from_str(&format!("[{}]", text.trim_end_matches(",\n"))).unwrap()
}

fn micros(nanos: i64) -> Value {
    serde_json::from_str(&format!("{}", nanos as f64 / 1e3)).unwrap()
}

proptest! {
    #[test]
    fn any_slice_is_json_with_its_values(
        name in "\\PC*", text in any::<String>(), row in 0u64..1 << 40, time in 0u64..1 << 50, length in 0u64..1 << 40,
        number in any::<u64>(), signed in -1i64 << 40..1 << 40, bits in any::<u64>(),
    ) {
        let at = At { row, time };
        let args = [
            ("text", Arg::Text(&text)), ("n", Arg::Number(number)), ("us", Arg::Micros(signed.into())),
            ("bits", Arg::Bits(bits)),
        ];
        let event = parsed(|lines| lines.slice(at, length, (&name, "kernel"), &args))[0].take();
        let plain: String = text.chars().map(|c| if c < ' ' { '?' } else { c }).collect();
        prop_assert_eq!(&event["name"], &Value::from(name));
        prop_assert_eq!(&event["args"]["text"], &Value::from(plain));
        prop_assert_eq!(&event["args"]["n"], &Value::from(number));
        prop_assert_eq!(event["args"]["us"].as_f64(), micros(signed).as_f64());
        let set: Vec<u64> = (0..64).filter(|bit| bits & 1 << bit != 0).collect();
        prop_assert_eq!(&event["args"]["bits"], &json!(set));
        prop_assert_eq!((&event["pid"], &event["tid"]), (&json!(3), &json!(row)));
        prop_assert_eq!(event["ts"].as_f64(), micros(time as i64).as_f64());
        prop_assert_eq!(event["dur"].as_f64(), micros(length as i64).as_f64());
    }
}

#[test]
fn an_arrow_has_two_ends_with_one_number() {
    let ends = parsed(|lines| lines.flow(7, At { row: 1, time: 1500 }, At { row: 2, time: 2001 }));
    let end = |i: usize| (ends[i]["ph"].clone(), ends[i]["tid"].clone(), ends[i]["ts"].clone());
    assert_eq!(end(0), (json!("s"), json!(1), json!(1.5)));
    assert_eq!(end(1), (json!("f"), json!(2), json!(2.001)));
    assert_eq!(ends[0]["id"], ends[1]["id"]);
}
