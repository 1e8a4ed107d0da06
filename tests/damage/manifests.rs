//! Manifests: the contents of a folder.

use crate::Outcome;
use crate::harm::{Draw, Harmed, harm, harm_json};
use crate::memory::within;
use evermoe::Error;
use evermoe::persist::{Manifest, SavedUnit};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

/// The fields as parsed by a reader that does not check shapes.
#[derive(Serialize, Deserialize)]
struct Fields {
    format: u64,
    version: u64,
    step: u64,
    layout: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    members: Vec<String>,
    units: Vec<Unit>,
}

#[derive(Serialize, Deserialize)]
struct Unit {
    name: String,
    file: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    origin: Option<String>,
    digest: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    part: Option<(u64, u64, u64)>,
    tensors: Vec<String>,
}

fn manifest(draw: &mut Draw) -> Manifest {
    let names = ["dense", "moe.experts.\u{fc}/0", "layers.1.\"quoted\"\\", "session", ""];
    let unit = |index: usize, draw: &mut Draw| SavedUnit {
        name: names[index].into(),
        file: format!("units-{}.safetensors", draw.below(3)),
        origin: (draw.below(4) == 0).then(|| "step-00000003.0000000001-7f01".into()),
        digest: draw.word() >> draw.below(60),
        part: (draw.below(4) == 0).then(|| (0, 1 + draw.below(9) as u64, 10 + draw.below(9) as u64)),
        tensors: vec!["weight".into(), "weight/exp_avg".into(), "bias".into()][..1 + draw.below(3)].to_vec(),
    };
    let units = (0..1 + draw.below(names.len())).map(|index| unit(index, draw)).collect();
    let members = ["a-7f01", "b-7f02"][..draw.below(3)].iter().map(|&name| name.into()).collect();
    let (version, step) = (draw.extreme(), draw.extreme());
    Manifest { version, step, layout: format!("{:016x}", draw.word()), members, units }
}

fn read(text: &[u8]) -> Option<Manifest> {
    match within(64 * text.len() + 10_000, || Manifest::from_json(text)) {
        Ok(manifest) => Some(manifest),
        Err(Error::Corrupt { problem, .. }) if !problem.is_empty() => None,
        Err(other) => panic!("expected it to be corrupt, got {other:?}"),
    }
}

/// Damaged bytes of a manifest, without a new checksum.
pub(super) fn damaged() -> impl FnMut(&mut Draw) -> Outcome {
    |draw| {
        let (one, two) = (manifest(draw), manifest(draw));
        let (text, other) = (one.to_json().unwrap(), two.to_json().unwrap());
        let text = match draw.one_in(4) {
            true => harm_json(draw, &text).text,
            false => harm(draw, text.as_bytes(), other.as_bytes()),
        };
        let Some(found) = read(&text) else { return Outcome::Refused };
        assert!(found == one || found == two, "{}", String::from_utf8_lossy(&text));
        Outcome::Same
    }
}

/// Manifests of a writer with other rules, with the checksum that the reader computes from its own reading of the text.
pub(super) fn sealed() -> impl FnMut(&mut Draw) -> Outcome {
    |draw| {
        let text = manifest(draw).to_json().unwrap();
        let (fields, _) = text.split_once(",\"checksum\"").unwrap();
        let Harmed { text, repeats } = harm_json(draw, &format!("{fields}}}"));
        let canonical = match serde_json::from_slice::<Fields>(&text) {
            Ok(fields) => serde_json::to_vec(&fields).unwrap(),
            Err(_) => text.clone(),
        };
        let open = text.strip_suffix(b"}").unwrap_or(&text);
        let seal = format!(",\"checksum\":\"{:016x}\"}}", xxh3_64(&canonical));
        let harmed = Harmed { text: [open, seal.as_bytes()].concat(), repeats };
        let Some(found) = read(&harmed.text) else { return Outcome::Refused };
        let said: Value = serde_json::from_str(&found.to_json().unwrap()).unwrap();
        assert_eq!(Some(said), harmed.value(), "{}", String::from_utf8_lossy(&harmed.text));
        Outcome::Same
    }
}
