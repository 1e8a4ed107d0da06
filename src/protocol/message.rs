//! What a member tells the others through the Lighthouse: a strict schema, with the number of the protocol.
//!
//! ```text
//! {"evermoe":1,"job":"j","established":false,"message":"{\"layout\":…,\"standing\":{…},…}","seal":"5e…"}
//! ```
//!
//! These fields stay in every protocol, so that members of different ones can tell that they are of one job. The seal is
//! there if the job has a secret: a tag of the sender's id and of the other fields. Anybody can tell the Lighthouse
//! something: what does not parse is a stranger's, and no reason to fail.

use super::event::Standing;
use super::version::STEP_BITS;
use crate::secret::Secret;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Number of the protocol; it grows with every change of what members tell each other, or of what they conclude from it.
pub const PROTOCOL: u64 = 9;
/// Purpose of the tags of messages.
const SEAL: &str = "message";
/// What stands in the place of a member's message in that of an operator.
const PROMOTION: &str = "promote";
/// What stands there in that of a member that speaks for another one whose process has ended.
const ENDED: &str = "ended ";
/// Bytes of the longest message that is read.
const MAX_BYTES: usize = 1 << 20;

/// Everything that a member tells about itself, but for its job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Digest of the names, shapes and types of all units of its model.
    pub layout: String,
    /// Options and versions that all members have alike, as text by name.
    pub options: BTreeMap<String, String>,
    /// How replicas repeat its steps; empty where it sends no gradients.
    pub arithmetic: String,
    /// The machine whose memory dies as one.
    pub node: String,
    /// What fails with that machine, from the largest to the smallest, as `zone/rack`; empty where it does not say.
    pub domain: String,
    /// What it does.
    pub role: Role,
    /// Steps after which its script ends the job; 0 where no script does.
    pub steps: u64,
    /// Ranks follow the order of these.
    pub rank_key: String,
    /// Address of its store, `host:port`.
    pub store: String,
    /// Address of its door, `host:port`.
    pub door: String,
    /// Address of its port for messages beside the collectives, `host:port`.
    pub transport: String,
    /// Members that it could not reach.
    pub unreachable: Vec<String>,
    /// Whether it waits for the answer, or trains meanwhile.
    pub waits: bool,
    /// Seconds for which it still gives absent members time to come back.
    pub patience: f64,
    /// What the protocol concludes from.
    pub standing: Standing,
}

/// What a member does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It trains.
    Train,
    /// It keeps copies.
    Replica,
}

/// What was made of something that the Lighthouse passed on.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Heard {
    /// A member of some job, of this protocol.
    Member {
        /// Its job.
        job: String,
        /// What it told.
        message: Box<Message>,
    },
    /// An operator, who says that the members of the set go on though others may be missing.
    Promotion {
        /// Their job.
        job: String,
        /// The newest generation of the members that it is for; none if it only asks who is there.
        generation: Option<u64>,
    },
    /// Others, which say that a member's process has ended: under its name, so that the Lighthouse does not wait for it,
    /// and under another one, so that its set gets another number.
    Ended {
        /// Its job.
        job: String,
        /// Its id.
        member: String,
    },
    /// A member of some job, of another protocol.
    OtherProtocol {
        /// Number of its protocol.
        protocol: u64,
        /// Its job.
        job: String,
        /// Whether it has state of the running job.
        established: bool,
    },
    /// Something that says to be of some job, and is not from a member that has this one's secret.
    OtherSecret {
        /// Its job, as it says.
        job: String,
        /// How the two differ, for people.
        why: String,
    },
    /// No member of any job.
    Stranger {
        /// What is wrong with it, for people.
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

/// What all protocols have in common.
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
    /// Why it is not from a member with the same secret, or with none like this one.
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
                if is_same { None } else { Some("its EVERMOE_SECRET is another one than this worker's") }
            }
        }
    }
}

/// What a seal is a tag of.
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

/// The JSON by which the member `id` tells others about itself.
///
/// # Errors
/// The reason why [`hear`] would not take it.
pub fn tell(id: &str, job: &str, message: &Message, secret: Option<&Secret>) -> Result<String, String> {
    check(message)?;
    let inner = serde_json::to_string(message).map_err(|error| error.to_string())?;
    wrap(id, job, inner, message.standing.established, secret)
}

/// The JSON by which an operator tells, under the name `id`, that the members of the set go on though others may be
/// missing.
///
/// It holds while `generation` is the newest of the members: what somebody has recorded means nothing once they have gone
/// on. Without one it only asks who is there.
///
/// # Errors
/// The reason why it cannot be written.
pub fn promote(
    id: &str,
    job: &str,
    generation: Option<u64>,
    secret: Option<&Secret>,
) -> Result<String, String> {
    let message =
        generation.map_or_else(|| PROMOTION.to_owned(), |generation| format!("{PROMOTION} {generation}"));
    wrap(id, job, message, false, secret)
}

/// The JSON by which others tell, under the name `id`, that the process of `member` has ended.
///
/// # Errors
/// The reason why it cannot be written.
pub fn tell_ended(id: &str, job: &str, member: &str, secret: Option<&Secret>) -> Result<String, String> {
    wrap(id, job, format!("{ENDED}{member}"), false, secret)
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

/// Reads what was told under the name `id`, of which nothing is taken for granted.
///
/// ```
/// use evermoe::protocol::{Heard, hear};
/// let newer = r#"{"evermoe":1000,"job":"j","established":true,"more":[]}"#;
/// assert_eq!(hear("a", newer, None), Heard::OtherProtocol { protocol: 1000, job: "j".into(), established: true });
/// assert!(matches!(hear("a", "{}", None), Heard::Stranger { .. }));
/// ```
#[must_use]
pub fn hear(id: &str, text: &str, secret: Option<&Secret>) -> Heard {
    read(id, text, secret).unwrap_or_else(|why| Heard::Stranger { why })
}

fn read(id: &str, text: &str, secret: Option<&Secret>) -> Result<Heard, String> {
    if text.len() > MAX_BYTES {
        return Err(format!("it has {} bytes, more than {MAX_BYTES}", text.len()));
    }
    let any: AnyProtocol = parse(text)?;
    if let Some(why) = any.problem(id, secret) {
        return Ok(Heard::OtherSecret { job: any.job, why: why.into() });
    }
    if any.evermoe != PROTOCOL {
        return Ok(Heard::OtherProtocol {
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
            None => return Err("promotion: expected a generation after it".into()),
        };
        return Ok(Heard::Promotion { job: envelope.job, generation });
    }
    if let Some(member) = envelope.message.strip_prefix(ENDED).filter(|_| !envelope.established) {
        return Ok(Heard::Ended { job: envelope.job, member: member.into() });
    }
    let message: Message = parse(&envelope.message)?;
    // serde takes lists for objects and leaves out what may be none; members write every field, by its name.
    if serde_json::to_value(&message).ok() != Some(parse(&envelope.message)?) {
        return Err("the message is not as a member writes it".into());
    }
    check(&message)?;
    if message.standing.established != envelope.established {
        return Err("it says twice whether it is established, and not the same".into());
    }
    Ok(Heard::Member { job: envelope.job, message: Box::new(message) })
}

fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, String> {
    if !text.trim_start().starts_with('{') {
        return Err("expected a JSON object".into()); // serde would take a list of the fields' values, too
    }
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// What the types do not say.
fn check(message: &Message) -> Result<(), String> {
    for (name, address) in
        [("store", &message.store), ("door", &message.door), ("transport", &message.transport)]
    {
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
    let standing = &message.standing;
    let most = (1 << (u64::BITS - STEP_BITS)) - 1;
    let own = [("generation", standing.generation), ("state", standing.state)];
    let groups = standing.seat.iter().map(|seat| ("seat", seat.generation));
    let begun = standing.begun.iter().flat_map(|begun| &begun.groups);
    let begun = begun.map(|&(_, generation)| ("begun", generation));
    for (name, generation) in own.into_iter().chain(groups).chain(begun) {
        if generation >= most {
            return Err(format!("{name}: expected a generation below {most}, got {generation}"));
        }
    }
    Ok(())
}
