//! Manifest of a save: the files that hold the units, and the version of each. Strict JSON; pure.
//!
//! ```text
//! {"format":2,"version":…,"step":…,"layout":"…","units":[{"name":…,"file":…,"digest":…,"tensors":[…]}, …],"checksum":"…"}
//! ```
//!
//! If a unit has not changed since another checkpoint, its file may be that checkpoint's: then the unit has `"origin"`,
//! too, and the format is 3. If several members save a unit together, each has a part of its bytes. Then the unit has
//! `"part":[start,end,of]`, `"members"` lists the members that save the version together, and the format is 4.
//!
//! The checksum is the xxh3-64 of the text without it, as [`Manifest::to_json`] writes that. It covers every field,
//! including the version.

use crate::error::{Error, Result};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;
use xxhash_rust::xxh3::xxh3_64;

/// Number of the format; raised with every change of the fields.
pub const MANIFEST_FORMAT: u64 = 2;
/// Number of the format in which some units are in files of other checkpoints.
pub const SHARING_FORMAT: u64 = 3;

/// Number of the format in which members save a version together, some units in parts.
pub const PARTS_FORMAT: u64 = 4;

/// Units of one version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Version of the units.
    pub version: u64,
    /// Number of steps of the version.
    pub step: u64,
    /// Digest of the names, shapes and types of all units of the model.
    pub layout: String,
    /// Members that save the essential units of the version, each with its own manifest; empty if one member saves all.
    pub members: Vec<String>,
    /// The units, each name once.
    pub units: Vec<SavedUnit>,
}

/// Location of a unit's bytes, and their digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedUnit {
    /// Name of the unit.
    pub name: String,
    /// Name of a file in the folder of the manifest, or of `origin`.
    pub file: String,
    /// Name of another checkpoint in the same folder, if the file belongs to it.
    pub origin: Option<String>,
    /// xxh3-64 of all of the unit's bytes, even if only a part of them is in the file.
    pub digest: u64,
    /// First byte, byte after the last, and size of the unit, if the file has a part of it.
    pub part: Option<(u64, u64, u64)>,
    /// Names of its tensors, in the order of its bytes.
    pub tensors: Vec<String>,
}

/// The fields in the file's form.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    format: u64,
    version: u64,
    step: u64,
    layout: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    members: Vec<String>,
    units: Vec<Object<UnitFields>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    checksum: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UnitFields {
    name: String,
    file: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    origin: Option<String>,
    digest: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    part: Option<(u64, u64, u64)>,
    tensors: Vec<String>,
}

/// Fields that all formats have in common.
#[derive(Deserialize)]
struct AnyFormat {
    format: u64,
}

/// A JSON object. Without this wrapper serde would also accept a list of the fields' values.
#[derive(Serialize)]
#[serde(transparent)]
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        from.deserialize_map(Fielded(PhantomData)).map(Self)
    }
}

struct Fielded<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Fielded<T> {
    type Value = T;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> std::result::Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map))
    }
}

impl Manifest {
    /// Returns the text of the manifest's file.
    ///
    /// ```
    /// use evermoe::persist::{Manifest, SavedUnit};
    /// let unit = SavedUnit { name: "head".into(), file: "units-0.safetensors".into(), origin: None, digest: 7, part: None, tensors: vec!["bias".into()] };
    /// let manifest = Manifest { version: 3, step: 3, layout: "5e".into(), members: vec![], units: vec![unit] };
    /// assert_eq!(Manifest::from_json(manifest.to_json()?.as_bytes())?, manifest);
    /// # Ok::<(), evermoe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if [`from_json`](Self::from_json) would refuse it.
    pub fn to_json(&self) -> Result<String> {
        self.check().map_err(Error::invalid)?;
        let mut fields = self.fields();
        fields.checksum = Some(hex(checksum(&fields)?));
        json(&fields)
    }

    /// Reads the text of [`to_json`](Self::to_json).
    ///
    /// # Errors
    /// [`Error::Corrupt`] naming the defect.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        let unreadable = |error: serde_json::Error| Error::corrupt(error.to_string());
        let Object(AnyFormat { format }) = serde_json::from_slice(text).map_err(unreadable)?;
        if ![MANIFEST_FORMAT, SHARING_FORMAT, PARTS_FORMAT].contains(&format) {
            return Err(Error::corrupt(format!("format {format}, expected {MANIFEST_FORMAT}")));
        }
        let Object(mut fields): Object<Fields> = serde_json::from_slice(text).map_err(unreadable)?;
        let expected = fields.checksum.take();
        if expected != Some(hex(checksum(&fields)?)) {
            return Err(Error::corrupt("the manifest's text does not match its checksum"));
        }
        let manifest = Self::from_fields(fields).map_err(Error::corrupt)?;
        if manifest.format() != format {
            return Err(Error::corrupt(format!(
                "format {format}, but that of its units is {}",
                manifest.format()
            )));
        }
        manifest.check().map_err(Error::corrupt)?;
        Ok(manifest)
    }

    fn format(&self) -> u64 {
        if !self.members.is_empty() || self.units.iter().any(|unit| unit.part.is_some()) {
            PARTS_FORMAT
        } else if self.units.iter().any(|unit| unit.origin.is_some()) {
            SHARING_FORMAT
        } else {
            MANIFEST_FORMAT
        }
    }

    fn fields(&self) -> Fields {
        let unit = |unit: &SavedUnit| {
            let (name, file, origin) = (unit.name.clone(), unit.file.clone(), unit.origin.clone());
            let (digest, part) = (hex(unit.digest), unit.part);
            Object(UnitFields { name, file, origin, digest, part, tensors: unit.tensors.clone() })
        };
        Fields {
            format: self.format(),
            version: self.version,
            step: self.step,
            layout: self.layout.clone(),
            members: self.members.clone(),
            units: self.units.iter().map(unit).collect(),
            checksum: None,
        }
    }

    fn from_fields(fields: Fields) -> std::result::Result<Self, String> {
        let unit = |Object(unit): Object<UnitFields>| {
            let digest =
                u64::from_str_radix(&unit.digest, 16).ok().filter(|&value| hex(value) == unit.digest);
            let digest = digest.ok_or_else(|| {
                format!(
                    "unit {:?}: expected a digest of 16 hexadecimal digits, got {:?}",
                    unit.name, unit.digest
                )
            })?;
            let UnitFields { name, file, origin, part, tensors, .. } = unit;
            Ok(SavedUnit { name, file, origin, digest, part, tensors })
        };
        let units = fields.units.into_iter().map(unit).collect::<std::result::Result<_, String>>()?;
        let Fields { version, step, layout, members, .. } = fields;
        Ok(Self { version, step, layout, members, units })
    }

    fn check(&self) -> std::result::Result<(), String> {
        if self.units.is_empty() {
            return Err("expected one or more units, got none".into());
        }
        let mut names = BTreeSet::new();
        for unit in &self.units {
            let SavedUnit { name, file, origin, part, tensors, .. } = unit;
            if !names.insert(name) {
                return Err(format!("unit {name:?} occurs twice"));
            }
            if !is_file_name(file) {
                return Err(format!(
                    "unit {name:?}: expected the name of a file in the manifest's folder, got {file:?}"
                ));
            }
            if let Some(origin) = origin.as_ref().filter(|origin| !is_file_name(origin)) {
                return Err(format!(
                    "unit {name:?}: expected the name of a checkpoint in the same folder, got {origin:?}"
                ));
            }
            if let Some((start, end, of)) = part.filter(|&(start, end, of)| start >= end || end > of) {
                return Err(format!(
                    "unit {name:?}: expected a part of its {of} bytes, got those from {start} to {end}"
                ));
            }
            if tensors.is_empty() || tensors.iter().collect::<BTreeSet<_>>().len() != tensors.len() {
                return Err(format!(
                    "unit {name:?}: expected one or more tensors, each named once, got {tensors:?}"
                ));
            }
        }
        Ok(())
    }
}

/// Whether a path has a single component, so that it cannot leave the folder.
fn is_file_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0'])
}

fn checksum(fields: &Fields) -> Result<u64> {
    Ok(xxh3_64(json(fields)?.as_bytes()))
}

fn json(fields: &Fields) -> Result<String> {
    serde_json::to_string(fields).map_err(|error| Error::invalid(error.to_string()))
}

fn hex(value: u64) -> String {
    format!("{value:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let unit = |name: &str| SavedUnit {
            name: name.into(),
            file: "units-0.safetensors".into(),
            origin: None,
            digest: 0x0123_4567_89ab_cdef,
            part: None,
            tensors: vec!["weight".into(), "weight/exp_avg".into()],
        };
        let units = vec![unit("dense"), unit("moe.experts.\u{fc}/0")];
        Manifest { version: 3 << 40 | 7, step: 7, layout: "L".into(), members: vec![], units }
    }

    fn refused(text: &str) -> String {
        match Manifest::from_json(text.as_bytes()) {
            Err(Error::Corrupt { problem, .. }) => problem,
            other => panic!("{text}: {other:?}"),
        }
    }

    /// Returns the text with a field changed and the checksum recomputed, as a writer with other rules would produce
    /// it.
    fn sealed(from: &str, to: &str) -> String {
        let body = json(&manifest().fields()).unwrap().replacen(from, to, 1);
        let checksum = serde_json::from_str(&body).map_or(0, |fields: Fields| checksum(&fields).unwrap());
        format!("{},\"checksum\":\"{checksum:016x}\"}}", &body[..body.len() - 1])
    }

    #[test]
    fn is_read_as_it_was_written() {
        let text = manifest().to_json().unwrap();
        assert_eq!(Manifest::from_json(text.as_bytes()).unwrap(), manifest());
        assert_eq!(text, sealed("", ""));
    }

    #[test]
    fn a_unit_may_be_in_a_file_of_another_checkpoint() {
        let mut shared = manifest();
        shared.units[1].origin = Some("step-00000003.0000000002-7f01".into());
        let text = shared.to_json().unwrap();
        assert!(
            text.starts_with("{\"format\":3,") && text.contains(",\"origin\":\"step-00000003."),
            "{text}"
        );
        assert_eq!(Manifest::from_json(text.as_bytes()).unwrap(), shared);
        for wrong in ["", "..", "/elsewhere", "a/b"] {
            shared.units[1].origin = Some(wrong.into());
            assert!(
                shared.to_json().unwrap_err().to_string().contains("a checkpoint in the same folder"),
                "{wrong}"
            );
        }
        assert!(refused(&sealed("\"format\":2", "\"format\":3")).contains("that of its units is 2"));
    }

    #[test]
    fn a_unit_may_be_there_in_part() {
        let mut parted = manifest();
        parted.units[0].part = Some((64, 128, 1000));
        parted.members = vec!["a".into(), "b".into()];
        let text = parted.to_json().unwrap();
        assert!(text.starts_with("{\"format\":4,") && text.contains(",\"part\":[64,128,1000],"), "{text}");
        assert_eq!(Manifest::from_json(text.as_bytes()).unwrap(), parted);
        for wrong in [(64, 64, 100), (128, 64, 1000), (0, 1001, 1000)] {
            parted.units[0].part = Some(wrong);
            assert!(parted.to_json().unwrap_err().to_string().contains("a part of its"), "{wrong:?}");
        }
        assert!(refused(&sealed("\"format\":2", "\"format\":4")).contains("that of its units is 2"));
    }

    #[test]
    fn a_changed_byte_is_found_or_changes_nothing() {
        let text = manifest().to_json().unwrap().into_bytes();
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut damaged = text.clone();
                damaged[at] ^= 1 << bit;
                if let Ok(read) = Manifest::from_json(&damaged) {
                    assert_eq!(read, manifest(), "byte {at}, bit {bit}");
                }
            }
        }
    }

    #[test]
    fn every_cut_is_found() {
        let text = manifest().to_json().unwrap();
        for end in (0..text.len()).filter(|&end| text.is_char_boundary(end)) {
            refused(&text[..end]);
        }
    }

    #[test]
    fn what_is_not_as_it_should_be_is_named() {
        let unit = manifest().fields().units.remove(0);
        let object = serde_json::to_string(&unit).unwrap();
        let list = serde_json::json!([unit.0.name, unit.0.file, unit.0.digest, unit.0.tensors]).to_string();
        for (from, to, message) in [
            ("\"format\":2", "\"format\":9", "format 9, expected 2"),
            ("\"format\":2,", "", "missing field `format`"),
            ("\"step\":7", "\"step\":7,\"extra\":1", "unknown field `extra`"),
            ("\"step\":7", "\"step\":7,\"step\":7", "duplicate field `step`"),
            ("\"step\":7", "\"step\":-7", "expected u64"),
            ("\"step\":7", "\"step\":7.5", "expected u64"),
            ("\"step\":7", "\"step\":18446744073709551616", "expected u64"),
            ("\"step\":7", "\"step\":Infinity", "expected value"),
            ("units-0.safetensors", "/etc/passwd", "in the manifest's folder"),
            ("units-0.safetensors", "..", "in the manifest's folder"),
            ("units-0.safetensors", "../step-1/units-0.safetensors", "in the manifest's folder"),
            ("units-0.safetensors", "", "in the manifest's folder"),
            ("\"file\":\"units-0.safetensors\"", "\"file\":7", "expected a string"),
            ("0123456789abcdef", "0123456789ABCDEF", "16 hexadecimal digits"),
            ("0123456789abcdef", "+123456789abcdef", "16 hexadecimal digits"),
            ("\"name\":\"dense\"", "\"name\":\"moe.experts.\u{fc}/0\"", "occurs twice"),
            ("[\"weight\",\"weight/exp_avg\"]", "[]", "one or more tensors"),
            ("\"weight/exp_avg\"", "\"weight\"", "each named once"),
            (&object, &list, "invalid type: sequence, expected an object"),
        ] {
            let found = refused(&sealed(from, to));
            assert!(found.contains(message), "{to}: {found}");
        }
        assert!(
            refused(&manifest().to_json().unwrap().replace("\"step\":7", "\"step\":6")).contains("checksum")
        );
        assert!(refused(&json(&manifest().fields()).unwrap()).contains("checksum"));
        for text in ["", "{", "[]", "7", "null", "{\"units\":[]}"] {
            refused(text);
        }
        assert!(!refused(&"[".repeat(100_000)).is_empty());
        assert!(!refused(&format!("{{\"format\":{}", "[".repeat(100_000))).is_empty());
        assert!(!refused(&format!("{{\"format\":2,\"units\":{}", "[".repeat(100_000))).is_empty());
    }

    #[test]
    fn what_could_not_be_read_is_not_written() {
        let empty = Manifest { units: vec![], ..manifest() };
        assert!(matches!(empty.to_json(), Err(Error::Invalid { .. })));
    }
}
