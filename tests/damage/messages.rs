//! Messages through the Lighthouse, from members and from anyone else.

use crate::Outcome;
use crate::harm::{Draw, harm, harm_json, same};
use crate::memory::within;
use evermoe::protocol::{
    Begun, Decoded, LastGroup, Message, Quarantine, Role, Standing, decode_message, encode_message,
};
use evermoe::secret::Secret;
use serde_json::Value;

const SECRET: &str = "correct horse battery staple";

fn message(draw: &mut Draw) -> Message {
    let standing = Standing {
        epoch: Some(draw.word()).filter(|word| word % 2 == 0),
        established: draw.one_in(2),
        size: draw.below(9),
        generation: draw.word() >> 50,
        state: draw.word() >> 50,
        named: vec![(draw.word(), draw.extreme()); draw.below(3)],
        has_progress: draw.one_in(2),
        adopted: draw.extreme(),
        inquires: draw.one_in(2),
        is_done: draw.one_in(2),
        is_spare: draw.one_in(2),
        last_group: draw.one_in(2).then(|| LastGroup {
            epoch: draw.word(),
            generation: draw.word() >> 50,
            size: draw.below(9),
            is_first: draw.one_in(2),
            leaves: draw.one_in(2),
            left: draw.below(9),
        }),
        known: draw.word() >> 50,
        begun: (0..draw.below(3))
            .map(|_| Begun {
                members: vec!["b".into(); draw.below(3)],
                groups: vec![(draw.word(), draw.word() >> 50); draw.below(3)],
            })
            .collect(),
    };
    Message {
        layout: format!("{:016x}", draw.word()),
        options: [("slots".into(), "None".into()), ("\u{fc}".into(), "\"quoted\"".into())].into(),
        arithmetic: "torch".into(),
        node: "node-7".into(),
        hardware: "GPU-7".into(),
        quarantined: (0..draw.below(3))
            .map(|_| Quarantine {
                member: "b".into(),
                node: "node-8".into(),
                hardware: "GPU-8".into(),
                why: "Xid 79".into(),
                is_lifted: draw.one_in(2),
            })
            .collect(),
        steps: draw.extreme(),
        role: *draw.pick(&[Role::Train, Role::Replica]),
        domain: String::new(),
        rank_key: String::new(),
        island: None,
        store: format!("host:{}", 1 + draw.below(65_535)),
        probe_address: format!("[::1]:{}", 1 + draw.below(65_535)),
        transport: format!("[::1]:{}", 1 + draw.below(65_535)),
        unreachable: vec!["b".into(); draw.below(3)],
        waits: draw.one_in(2),
        patience: draw.below(1000) as f64 / 8.0,
        standing,
    }
}

fn read(id: &str, text: &str, secret: Option<&Secret>) -> Decoded {
    within(64 * text.len() + 10_000, || decode_message(id, text, secret))
}

fn damaged(draw: &mut Draw, text: &str, other: &str) -> String {
    let bytes = match draw.one_in(3) {
        true => harm_json(draw, text),
        false => harm(draw, text.as_bytes(), other.as_bytes()),
    };
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Messages with a seal: only messages that members sent under their own names are accepted.
pub(super) fn sealed() -> impl FnMut(&mut Draw) -> Outcome {
    let secret = Secret::new(SECRET).unwrap();
    move |draw| {
        let (one, two) = (message(draw), message(draw));
        let (text, other) = (
            encode_message("a", "job", &one, Some(&secret)).unwrap(),
            encode_message("b", "job", &two, Some(&secret)).unwrap(),
        );
        let text = if draw.one_in(8) { other } else { damaged(draw, &text, &other) };
        match read("a", &text, Some(&secret)) {
            Decoded::Member { job, message } => {
                assert_eq!((job.as_str(), *message), ("job", one), "{text}");
                Outcome::Same
            }
            Decoded::OtherProtocol { .. } => panic!("the number of the protocol is under the seal: {text}"),
            _ => Outcome::Refused,
        }
    }
}

/// Messages without a seal: they are read literally. Of an option that occurs twice the last one counts.
pub(super) fn open() -> impl FnMut(&mut Draw) -> Outcome {
    move |draw| {
        let (one, two) = (message(draw), message(draw));
        let (text, other) = (
            encode_message("a", "job", &one, None).unwrap(),
            encode_message("b", "job", &two, None).unwrap(),
        );
        let text = match draw.one_in(2) {
            true => within_envelope(draw, &text),
            false => damaged(draw, &text, &other),
        };
        let Decoded::Member { job, message } = read("a", &text, None) else { return Outcome::Refused };
        let again = encode_message("a", &job, &message, None).unwrap();
        let [said, heard] = [&text, &again].map(|text| inner(text));
        assert!(same(&said, &heard), "{text} is read as {again}");
        Outcome::Same
    }
}

fn inner(text: &str) -> Value {
    let envelope: Value = serde_json::from_str(text).unwrap();
    serde_json::from_str(envelope["message"].as_str().unwrap()).unwrap()
}

/// An envelope with a damaged message.
fn within_envelope(draw: &mut Draw, text: &str) -> String {
    let mut envelope: Value = serde_json::from_str(text).unwrap();
    let harmed = harm_json(draw, envelope["message"].as_str().unwrap());
    envelope["message"] = String::from_utf8_lossy(&harmed).into();
    envelope.to_string()
}
