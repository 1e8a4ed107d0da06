//! Messages between members through the Lighthouse: a strict schema, with a version of the protocol.
//!
//! ```text
//! {"evermoe":1,"job":"j","established":false,"message":"{\"layout\":…,\"standing\":{…},…}","seal":"5e…"}
//! ```
//!
//! These fields stay the same in every version, so that members of different versions can recognise that they are of
//! one job. The seal is present if the job has a secret: a tag of the sender's id and of the other fields. Anyone can
//! send something to the Lighthouse: text that does not parse is treated as a stranger's and is no error.

use super::event::{Island, Standing};
use super::version::STEP_BITS;
use crate::secret::Secret;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of the protocol; raised with every change of the messages or of the conclusions drawn from them.
pub const PROTOCOL: u64 = 13;
/// Purpose of the tags of messages.
const SEAL: &str = "message";
/// Content of an operator's message, in place of a member's.
const PROMOTION: &str = "promote";
/// Prefix of the content of a message which reports that another member's process has ended.
const ENDED: &str = "ended ";
/// Prefix of the content of an operator's message which lifts quarantines.
const LIFT: &str = "lift ";
/// Maximum number of quarantines in a message.
const MAX_QUARANTINES: usize = 1000;
/// Maximum size of a message that is read.
const MAX_BYTES: usize = 1 << 20;

/// Complete report of a member, except for its job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Digest of the names, shapes and types of all units of its model.
    pub layout: String,
    /// Options and versions that must be the same on all members, as text by name.
    pub options: BTreeMap<String, String>,
    /// Arithmetic by which replicas repeat its steps; empty if it sends no gradients.
    pub arithmetic: String,
    /// The machine whose memory is lost as one.
    pub node: String,
    /// The UUID of its GPU, or the node if it has none: what is faulty if its steps are.
    pub hardware: String,
    /// Members that have left because their hardware is faulty, as far as it knows.
    pub quarantined: Vec<Quarantine>,
    /// Failure domains of that machine, from the largest to the smallest, as `zone/rack`; empty if unknown.
    pub domain: String,
    /// Its role.
    pub role: Role,
    /// Number of steps after which its script ends the job; 0 if the script does not.
    pub steps: u64,
    /// Sort key of ranks.
    pub rank_key: String,
    /// Its place in its island, if it has one.
    pub island: Option<Island>,
    /// Address of its store, `host:port`.
    pub store: String,
    /// Address of its probe server, `host:port`.
    pub probe_address: String,
    /// Addresses of its port for messages outside the collectives, `host:port`; of several cards, separated by commas.
    pub transport: String,
    /// Members that it could not reach.
    pub unreachable: Vec<String>,
    /// Whether it waits for the answer; if not, it trains meanwhile.
    pub waits: bool,
    /// Seconds for which it still gives absent members time to return.
    pub patience: f64,
    /// Its standing in the protocol.
    pub standing: Standing,
}

/// Refuses newcomers on some hardware, as a member left because it is faulty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quarantine {
    /// Id of that member.
    pub member: String,
    /// Its node.
    pub node: String,
    /// Its hardware.
    pub hardware: String,
    /// Reason why it left, for people.
    pub why: String,
    /// Whether an operator has lifted the quarantine.
    pub is_lifted: bool,
}

/// Role of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It trains.
    Train,
    /// It keeps copies.
    Replica,
}

/// A text that the Lighthouse passed on, decoded.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Decoded {
    /// A member of some job, with this version of the protocol.
    Member {
        /// Its job.
        job: String,
        /// Its report.
        message: Box<Message>,
    },
    /// An operator, who declares that the members of the set continue although others may be missing.
    Promotion {
        /// Job of these members.
        job: String,
        /// The newest generation of the members that it applies to; none if it only asks who is present.
        generation: Option<u64>,
    },
    /// Other members, which report that a member's process has ended. They report it under the member's name, so that
    /// the Lighthouse does not wait for it, and under another name, so that the set gets a new number.
    Ended {
        /// Its job.
        job: String,
        /// Its id.
        member: String,
    },
    /// An operator, who lifts quarantines.
    Lift {
        /// Job of the members that have the quarantines.
        job: String,
        /// The member, node or hardware that the lifted quarantines name; empty if it only asks who is present.
        name: String,
    },
    /// A member of some job, with another version of the protocol.
    OtherProtocol {
        /// Version of its protocol.
        protocol: u64,
        /// Its job.
        job: String,
        /// Whether it has state of the running job.
        established: bool,
    },
    /// A text that claims to be of some job, but not from a member with this one's secret.
    OtherSecret {
        /// The job that it claims.
        job: String,
        /// Difference between the secrets, for the log.
        why: String,
    },
    /// A text of no member.
    Stranger {
        /// Reason why it was rejected, for the log.
        why: String,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    evermoe: u64,
    job: String,
    established: bool,
    message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seal: Option<String>,
}

/// Fields that all versions of the protocol have in common.
#[derive(Deserialize)]
struct AnyProtocol {
    evermoe: u64,
    job: String,
    established: bool,
    #[serde(default)]
    message: String,
    #[serde(default)]
    seal: Option<String>,
}

impl AnyProtocol {
    /// Returns why it is not from a member with the same secret, or with none like this one.
    fn problem(&self, id: &str, secret: Option<&Secret>) -> Option<&'static str> {
        match (secret, &self.seal) {
            (None, None) => None,
            (None, Some(_)) => Some("it has an EVERMOE_SECRET, this worker has none"),
            (Some(_), None) => Some("it has no EVERMOE_SECRET, this worker has one"),
            (Some(secret), Some(seal)) => {
                let tag = from_hex(seal).unwrap_or_default();
                let (protocol, established) = (self.evermoe.to_le_bytes(), [u8::from(self.established)]);
                let parts = sealed(id, &protocol, &self.job, &established, &self.message);
                let is_same = secret.is_tag(&tag, SEAL, &parts);
                if is_same { None } else { Some("its EVERMOE_SECRET differs from this worker's") }
            }
        }
    }
}

/// Parts that a seal authenticates.
fn sealed<'a>(
    id: &'a str,
    protocol: &'a [u8],
    job: &'a str,
    established: &'a [u8],
    message: &'a str,
) -> [&'a [u8]; 5] {
    [id.as_bytes(), protocol, job.as_bytes(), established, message.as_bytes()]
}

fn to_hex(tag: &[u8]) -> String {
    tag.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = |pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    text.as_bytes().chunks(2).map(digits).collect()
}

/// Encodes the report of the member `id` as JSON.
///
/// # Errors
/// The reason why [`decode_message`] would reject it.
pub fn encode_message(
    id: &str,
    job: &str,
    message: &Message,
    secret: Option<&Secret>,
) -> Result<String, String> {
    check(message)?;
    let inner = serde_json::to_string(message).map_err(|error| error.to_string())?;
    wrap(id, job, inner, message.standing.established, secret)
}

/// Encodes an operator's declaration, under the name `id`, that the members of the set continue although others may be
/// missing.
///
/// It is valid while `generation` is the newest of the members, so that a recorded message has no effect later. Without
/// a generation it only asks who is present.
///
/// # Errors
/// The reason why it cannot be encoded.
pub fn encode_promotion(
    id: &str,
    job: &str,
    generation: Option<u64>,
    secret: Option<&Secret>,
) -> Result<String, String> {
    let message =
        generation.map_or_else(|| PROMOTION.to_owned(), |generation| format!("{PROMOTION} {generation}"));
    wrap(id, job, message, false, secret)
}

/// Encodes a report, under the name `id`, that the process of `member` has ended.
///
/// # Errors
/// The reason why it cannot be encoded.
pub fn encode_ended(id: &str, job: &str, member: &str, secret: Option<&Secret>) -> Result<String, String> {
    wrap(id, job, format!("{ENDED}{member}"), false, secret)
}

/// Encodes an operator's message, under the name `id`, which lifts the quarantines that name a member, a node or
/// hardware; with an empty name it only asks who is present.
///
/// # Errors
/// The reason why it cannot be encoded.
pub fn encode_lift(id: &str, job: &str, name: &str, secret: Option<&Secret>) -> Result<String, String> {
    wrap(id, job, format!("{LIFT}{name}"), false, secret)
}

fn wrap(
    id: &str,
    job: &str,
    message: String,
    established: bool,
    secret: Option<&Secret>,
) -> Result<String, String> {
    let seal = secret.map(|secret| {
        let parts = (PROTOCOL.to_le_bytes(), [u8::from(established)]);
        to_hex(&secret.tag(SEAL, &sealed(id, &parts.0, job, &parts.1, &message)))
    });
    serde_json::to_string(&Envelope { evermoe: PROTOCOL, job: job.into(), established, message, seal })
        .map_err(|error| error.to_string())
}

/// Decodes a text that was sent under the name `id`, without trusting any of it.
///
/// ```
/// use evermoe::protocol::{Decoded, decode_message};
/// let newer = r#"{"evermoe":1000,"job":"j","established":true,"more":[]}"#;
/// assert_eq!(decode_message("a", newer, None), Decoded::OtherProtocol { protocol: 1000, job: "j".into(), established: true });
/// assert!(matches!(decode_message("a", "{}", None), Decoded::Stranger { .. }));
/// ```
#[must_use]
pub fn decode_message(id: &str, text: &str, secret: Option<&Secret>) -> Decoded {
    read(id, text, secret).unwrap_or_else(|why| Decoded::Stranger { why })
}

fn read(id: &str, text: &str, secret: Option<&Secret>) -> Result<Decoded, String> {
    if text.len() > MAX_BYTES {
        return Err(format!("the message has {} bytes; expected at most {MAX_BYTES}", text.len()));
    }
    let any: AnyProtocol = parse(text)?;
    if let Some(why) = any.problem(id, secret) {
        return Ok(Decoded::OtherSecret { job: any.job, why: why.into() });
    }
    if any.evermoe != PROTOCOL {
        return Ok(Decoded::OtherProtocol {
            protocol: any.evermoe,
            job: any.job,
            established: any.established,
        });
    }
    let envelope: Envelope = parse(text)?;
    if let Some(generation) = envelope.message.strip_prefix(PROMOTION).filter(|_| !envelope.established) {
        let generation = match generation.strip_prefix(' ') {
            Some(digits) => Some(digits.parse().map_err(|error| format!("promotion: {error}"))?),
            None if generation.is_empty() => None,
            None => return Err("promotion: expected a generation after the word".into()),
        };
        return Ok(Decoded::Promotion { job: envelope.job, generation });
    }
    if let Some(member) = envelope.message.strip_prefix(ENDED).filter(|_| !envelope.established) {
        return Ok(Decoded::Ended { job: envelope.job, member: member.into() });
    }
    if let Some(name) = envelope.message.strip_prefix(LIFT).filter(|_| !envelope.established) {
        return Ok(Decoded::Lift { job: envelope.job, name: name.into() });
    }
    let message: Message = parse(&envelope.message)?;
    // serde also accepts lists for structs, and omits optional fields; members write every field by its name.
    if serde_json::to_value(&message).ok() != Some(parse(&envelope.message)?) {
        return Err("the message has missing, repeated or unnamed fields".into());
    }
    check(&message)?;
    if message.standing.established != envelope.established {
        return Err("the envelope and the message disagree on whether the sender is established".into());
    }
    Ok(Decoded::Member { job: envelope.job, message: Box::new(message) })
}

fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, String> {
    if !text.trim_start().starts_with('{') {
        return Err("expected a JSON object".into()); // serde also accepts a list of the fields' values
    }
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// Checks values beyond their types.
fn check(message: &Message) -> Result<(), String> {
    let cards = message.transport.split(',').map(|card| ("transport", card));
    let others = [("store", &*message.store), ("probe_address", &*message.probe_address)];
    for (name, address) in others.into_iter().chain(cards) {
        let port = address
            .rsplit_once(':')
            .filter(|(host, _)| !host.is_empty())
            .and_then(|(_, port)| port.parse().ok());
        if port.is_none_or(|port: u16| port == 0) {
            return Err(format!("{name}: expected host:port, got {address:?}"));
        }
    }
    if !(message.patience >= 0.0 && message.patience.is_finite()) {
        return Err(format!("patience: expected seconds, got {}", message.patience));
    }
    let quarantines = message.quarantined.len();
    if quarantines > MAX_QUARANTINES {
        return Err(format!("quarantined: expected at most {MAX_QUARANTINES}, got {quarantines}"));
    }
    if let Some(Island { name, position, size }) = &message.island
        && (name.is_empty() || position >= size)
    {
        return Err(format!(
            "island: expected a name and a position below the size, got {name:?}, position {position} of {size}"
        ));
    }
    let standing = &message.standing;
    let most = (1 << (u64::BITS - STEP_BITS)) - 1;
    let own = [("generation", standing.generation), ("state", standing.state)];
    let groups = standing.last_group.iter().map(|last_group| ("last_group", last_group.generation));
    let begun = standing.begun.iter().flat_map(|begun| &begun.groups);
    let begun = begun.map(|&(_, generation)| ("begun", generation));
    for (name, generation) in own.into_iter().chain(groups).chain(begun) {
        if generation >= most {
            return Err(format!("{name}: expected a generation below {most}, got {generation}"));
        }
    }
    Ok(())
}
