//! Messages through the Lighthouse: text from strangers is always recognised as such, and members' messages are
//! understood.

use evermoe::protocol::{
    Begun, Decoded, Island, LastGroup, Message, PROTOCOL, Quarantine, Role, Standing, decode_message,
    encode_ended, encode_lift, encode_message, encode_promotion,
};
use evermoe::secret::Secret;
use proptest::prelude::*;
use serde_json::{Value, json};

fn messages() -> impl Strategy<Value = Message> {
    let last_group = (any::<u64>(), 0..1_u64 << 20, 0..9_usize, any::<[bool; 2]>(), 0..9_usize).prop_map(
        |(epoch, generation, size, [is_first, leaves], left)| LastGroup {
            epoch,
            generation,
            size,
            is_first,
            leaves,
            left,
        },
    );
    let group = (any::<u64>(), 0..1_u64 << 20);
    let begun = (prop::collection::vec(".*", 0..3), prop::collection::vec(group, 0..3))
        .prop_map(|(members, groups)| Begun { members, groups });
    let groups = (prop::option::of(last_group), prop::collection::vec(begun, 0..3));
    let standing = (
        any::<Option<u64>>(),
        any::<bool>(),
        0..9_usize,
        0..1_u64 << 20,
        0..1_u64 << 20,
        (prop::collection::vec(any::<(u64, u64)>(), 0..3), any::<[u64; 2]>(), any::<[bool; 4]>()),
        groups,
    )
        .prop_map(
            |(
                epoch,
                established,
                size,
                generation,
                state,
                (named, [adopted, known], [inquires, is_done, has_progress, is_spare]),
                (last_group, begun),
            )| {
                Standing {
                    epoch,
                    established,
                    size,
                    generation,
                    state,
                    has_progress,
                    named,
                    adopted,
                    inquires,
                    is_done,
                    is_spare,
                    last_group,
                    known,
                    begun,
                }
            },
        );
    let options = prop::collection::btree_map(".*", ".*", 0..4);
    let texts = (".*", options, ".*", ".*", ".*", prop::collection::vec(".*", 0..3));
    (texts, any::<[bool; 2]>(), 1..u16::MAX, 0.0..1e9_f64, standing).prop_map(
        |(texts, [trains, waits], port, patience, standing)| {
            let (layout, options, arithmetic, node, rank_key, unreachable) = texts;
            let domain = format!("zone/{node}");
            let (member, hardware, why) = (rank_key.clone(), arithmetic.clone(), layout.clone());
            let quarantine =
                Quarantine { member, node: node.clone(), hardware: hardware.clone(), why, is_lifted: trains };
            let role = if trains { Role::Train } else { Role::Replica };
            let [store, probe_address, transport] =
                ["host", "127.0.0.1", "[::1]"].map(|host| format!("{host}:{port}"));
            Message {
                layout,
                options,
                arithmetic,
                node,
                hardware,
                quarantined: vec![quarantine; usize::from(waits)],
                domain,
                role,
                steps: port.into(),
                island: waits.then(|| Island {
                    name: format!("i{rank_key}"),
                    position: 0,
                    size: port.into(),
                }),
                rank_key,
                store,
                probe_address,
                transport,
                unreachable,
                waits,
                patience,
                standing,
            }
        },
    )
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".*".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        let list = prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from);
        prop_oneof![list, prop::collection::btree_map(".*", inner, 0..4).prop_map(|map| json!(map))]
    })
}

/// Every path of an object, including nested ones.
fn fields(value: &Value, path: &str, found: &mut Vec<String>) {
    for (name, inner) in value.as_object().into_iter().flatten() {
        let path = format!("{path}/{name}");
        fields(inner, &path, found);
        found.push(path);
    }
}

fn told(message: &Message) -> (Value, Value) {
    let envelope: Value = serde_json::from_str(&encode_message("a", "j", message, None).unwrap()).unwrap();
    let inner = serde_json::from_str(envelope["message"].as_str().unwrap()).unwrap();
    (envelope, inner)
}

/// The message with another inner part.
fn with(mut envelope: Value, inner: &Value) -> String {
    envelope["message"] = inner.to_string().into();
    envelope.to_string()
}

fn is_stranger(text: &str) -> bool {
    matches!(decode_message("a", text, None), Decoded::Stranger { .. })
}

fn example() -> Message {
    let standing = Standing {
        epoch: None,
        established: true,
        size: 0,
        generation: 1,
        state: 0,
        has_progress: false,
        named: vec![],
        adopted: 0,
        inquires: false,
        is_spare: false,
        is_done: false,
        last_group: None,
        known: 0,
        begun: vec![],
    };
    Message {
        layout: "5e".into(),
        options: [("slots".into(), "None".into())].into(),
        arithmetic: String::new(),
        node: "a".into(),
        hardware: "GPU-1".into(),
        quarantined: vec![],
        role: Role::Train,
        steps: 100,
        domain: String::new(),
        rank_key: String::new(),
        island: None,
        store: "a:1".into(),
        probe_address: "a:2".into(),
        transport: "a:3".into(),
        unreachable: vec![],
        waits: true,
        patience: 0.0,
        standing,
    }
}

proptest! {
    #[test]
    fn what_is_told_is_heard(message in messages(), job in ".*") {
        let text = encode_message("a", &job, &message, None).unwrap();
        prop_assert_eq!(decode_message("a", &text, None), Decoded::Member { job, message: Box::new(message) });
    }

    #[test]
    fn any_text_is_a_strangers(text in ".*") {
        prop_assert!(is_stranger(&text));
    }

    #[test]
    fn any_json_is_a_strangers(value in values()) {
        prop_assert!(is_stranger(&value.to_string()));
        prop_assert!(is_stranger(&with(told(&example()).0, &value)));
    }

    #[test]
    fn a_cut_message_is_a_strangers(message in messages(), at in any::<prop::sample::Index>()) {
        let text = encode_message("a", "j", &message, None).unwrap();
        let cut: String = text.chars().take(at.index(text.chars().count())).collect();
        prop_assert!(is_stranger(&cut));
    }

    #[test]
    fn a_field_of_another_type_is_noticed(value in values(), at in any::<prop::sample::Index>()) {
        let (envelope, mut inner) = told(&example());
        let mut places = Vec::new();
        fields(&inner, "", &mut places);
        let place = inner.pointer_mut(&places[at.index(places.len())]).unwrap();
        let kind = |value: &Value| std::mem::discriminant(value);
        prop_assume!(kind(place) != kind(&value) && !(place.is_null() && value.is_u64()));
        *place = value;
        prop_assert!(is_stranger(&with(envelope, &inner)));
    }
}

#[test]
fn a_missing_or_another_field_is_noticed_everywhere() {
    let (envelope, inner) = told(&example());
    let mut places = Vec::new();
    fields(&inner, "", &mut places);
    for place in
        places.iter().filter(|place| !["/options/slots", "/standing/epoch"].contains(&place.as_str()))
    {
        let (parent, name) = place.rsplit_once('/').unwrap();
        let mut less = inner.clone();
        let object = less.pointer_mut(parent).and_then(Value::as_object_mut).unwrap();
        let value = object.remove(name).unwrap();
        assert!(is_stranger(&with(envelope.clone(), &less)), "{place} is not missed");
        object_at(&mut less, parent).insert(name.into(), value);
        object_at(&mut less, parent).insert("another".into(), Value::Null);
        assert!(is_stranger(&with(envelope.clone(), &less)), "{parent} takes another field");
    }
    for name in ["evermoe", "job", "established", "message"] {
        let mut less = envelope.clone();
        less.as_object_mut().unwrap().remove(name);
        assert!(is_stranger(&less.to_string()), "{name} is not missed");
    }
}

fn object_at<'a>(value: &'a mut Value, path: &str) -> &'a mut serde_json::Map<String, Value> {
    value.pointer_mut(path).and_then(Value::as_object_mut).unwrap()
}

#[test]
fn what_the_types_do_not_say_is_checked() {
    let wrong: [(&str, Value); 12] = [
        ("/island", json!({"name": "", "position": 0, "size": 2})),
        ("/island", json!({"name": "a", "position": 2, "size": 2})),
        ("/island", json!({"name": "a", "position": 0, "size": 0})),
        ("/store", "host".into()),
        ("/store", ":80".into()),
        ("/probe_address", "host:0".into()),
        ("/probe_address", "host:65536".into()),
        ("/patience", (-1.0).into()),
        ("/role", "chief".into()),
        ("/standing/generation", (1_u64 << 24).into()),
        ("/standing/state", u64::MAX.into()),
        ("/standing/established", false.into()), // the envelope says true
    ];
    for (place, value) in wrong {
        let (envelope, mut inner) = told(&example());
        *inner.pointer_mut(place).unwrap() = value;
        assert!(is_stranger(&with(envelope, &inner)), "{place}");
    }
    assert!(encode_message("a", "j", &Message { store: "host".into(), ..example() }, None).is_err());
    assert!(encode_message("a", "j", &Message { patience: f64::NAN, ..example() }, None).is_err());
}

#[test]
fn members_of_other_protocols_are_known_whatever_else_they_tell() {
    for (protocol, more) in
        [(0, json!(null)), (PROTOCOL + 1, json!({"any": ["thing"]})), (u64::MAX, json!(1))]
    {
        let text = json!({"evermoe": protocol, "job": "j", "established": true, "new": more}).to_string();
        assert_eq!(
            decode_message("a", &text, None),
            Decoded::OtherProtocol { protocol, job: "j".into(), established: true }
        );
    }
}

#[test]
fn long_and_deep_texts_are_refused_at_once() {
    assert!(is_stranger(&"[".repeat(1 << 19)));
    let Decoded::Stranger { why } = decode_message("a", &" ".repeat((1 << 20) + 1), None) else {
        panic!("it is taken")
    };
    assert!(why.contains("1048577 bytes"));
}

fn secrets() -> (Secret, Secret) {
    (Secret::new("correct horse battery").unwrap(), Secret::new("another horse battery").unwrap())
}

/// Whether a decoded message is from a sender without the secret, and the reason given.
fn why(heard: Decoded) -> String {
    let Decoded::OtherSecret { job, why } = heard else { panic!("{heard:?}") };
    assert_eq!(job, "j");
    why
}

#[test]
fn only_members_with_the_same_secret_are_heard() {
    let (secret, other) = secrets();
    let sealed = encode_message("a", "j", &example(), Some(&secret)).unwrap();
    let open = encode_message("a", "j", &example(), None).unwrap();
    let message = Box::new(example());
    assert_eq!(decode_message("a", &sealed, Some(&secret)), Decoded::Member { job: "j".into(), message });
    assert_eq!(
        why(decode_message("a", &sealed, Some(&other))),
        "its EVERMOE_SECRET differs from this worker's"
    );
    assert_eq!(why(decode_message("a", &sealed, None)), "it has an EVERMOE_SECRET, this worker has none");
    assert_eq!(
        why(decode_message("a", &open, Some(&secret))),
        "it has no EVERMOE_SECRET, this worker has one"
    );
}

#[test]
fn a_seal_is_of_the_sender_and_of_every_field() {
    let (secret, _) = secrets();
    let text = encode_message("a", "j", &example(), Some(&secret)).unwrap();
    assert!(
        matches!(decode_message("b", &text, Some(&secret)), Decoded::OtherSecret { .. }),
        "told again under another name"
    );
    let values = [
        ("evermoe", json!(PROTOCOL + 1)),
        ("job", json!("k")),
        ("established", json!(false)),
        ("message", json!("{}")),
        ("seal", json!("5e")),
        ("seal", json!("")),
        ("seal", json!("\u{e9}x")),
    ];
    for (name, value) in values {
        let mut envelope: Value = serde_json::from_str(&text).unwrap();
        envelope[name] = value;
        let heard = decode_message("a", &envelope.to_string(), Some(&secret));
        assert!(matches!(heard, Decoded::OtherSecret { .. }), "{name} is changed: {heard:?}");
    }
}

#[test]
fn an_operators_word_names_the_generation_that_it_is_for() {
    let (secret, other) = secrets();
    for generation in [None, Some(0), Some(7), Some(u64::MAX)] {
        let text = encode_promotion("p", "j", generation, Some(&secret)).unwrap();
        assert_eq!(
            decode_message("p", &text, Some(&secret)),
            Decoded::Promotion { job: "j".into(), generation }
        );
        assert!(matches!(decode_message("p", &text, Some(&other)), Decoded::OtherSecret { .. }));
        let mut envelope: Value = serde_json::from_str(&text).unwrap();
        envelope["message"] = json!("promote 8");
        assert!(matches!(
            decode_message("p", &envelope.to_string(), Some(&secret)),
            Decoded::OtherSecret { .. }
        ));
    }
    let mut envelope: Value = serde_json::from_str(&encode_promotion("p", "j", None, None).unwrap()).unwrap();
    for wrong in ["promote ", "promote x", "promote -1", "promote1", "promote 1 2"] {
        envelope["message"] = json!(wrong);
        assert!(is_stranger(&envelope.to_string()), "{wrong:?}");
    }
}

#[test]
fn a_word_for_a_member_that_has_ended_names_it() {
    let (secret, other) = secrets();
    for member in ["", "b", "ended b", "a b"] {
        let text = encode_ended("a", "j", member, Some(&secret)).unwrap();
        let expected = Decoded::Ended { job: "j".into(), member: member.into() };
        assert_eq!(decode_message("a", &text, Some(&secret)), expected);
        for (id, secret) in [("a", Some(&other)), ("b", Some(&secret)), ("a", None)] {
            assert!(matches!(decode_message(id, &text, secret), Decoded::OtherSecret { .. }), "{id}");
        }
    }
    let mut envelope: Value = serde_json::from_str(&encode_ended("a", "j", "b", None).unwrap()).unwrap();
    for wrong in ["ended", "endedb", " ended b"] {
        envelope["message"] = json!(wrong);
        assert!(is_stranger(&envelope.to_string()), "{wrong:?}");
    }
}

#[test]
fn a_lift_names_what_is_lifted() {
    let (secret, other) = secrets();
    for name in ["", "b", "GPU-1 2"] {
        let text = encode_lift("a", "j", name, Some(&secret)).unwrap();
        let expected = Decoded::Lift { job: "j".into(), name: name.into() };
        assert_eq!(decode_message("a", &text, Some(&secret)), expected);
        assert!(matches!(decode_message("a", &text, Some(&other)), Decoded::OtherSecret { .. }));
    }
}

#[test]
fn a_message_has_a_limited_number_of_quarantines() {
    let one = || Quarantine {
        member: "b-1".into(),
        node: "b".into(),
        hardware: "b".into(),
        why: String::new(),
        is_lifted: false,
    };
    let text = |count| {
        let quarantined = (0..count).map(|_| one()).collect();
        encode_message("a", "j", &Message { quarantined, ..example() }, None)
    };
    assert!(matches!(decode_message("a", &text(1000).unwrap(), None), Decoded::Member { .. }));
    assert!(text(1001).is_err());
}

#[test]
fn values_without_names_are_no_message() {
    assert!(is_stranger(r#"[2, "j", false]"#));
    let (envelope, inner) = told(&example());
    let values: Vec<&Value> = inner.as_object().unwrap().values().collect();
    assert!(is_stranger(&with(envelope, &json!(values))));
}

#[test]
fn a_short_secret_is_refused() {
    let error = Secret::new("hunter2").unwrap_err().to_string();
    assert!(error.contains("16 characters or more, got 7") && !error.contains("hunter2"), "{error}");
    assert_eq!(format!("{:?}", secrets().0), "Secret(…)");
}
