//! How a process and the hub prove to each other that they know the secret, before anything else is read.
//!
//! Both send a random nonce; each answers with an HMAC-SHA256 of both nonces and of what it claims. The secret never
//! crosses the wire. Later frames are neither encrypted nor signed.

use super::wire::{self, VERSION};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

/// For the hub a greeting takes no longer.
pub(super) const GREETING: Duration = Duration::from_secs(3);

/// No frame of a greeting is longer.
const MOST: usize = 512;

const MAGIC: [u8; 8] = *b"gpu-pool";

type Nonce = [u8; 32];
type Proof = [u8; 32];

/// A process's first word. Its layout is the same in all versions.
#[derive(serde::Serialize, serde::Deserialize)]
struct Hello {
    magic: [u8; 8],
    version: u16,
    nonce: Nonce,
}

/// The hub's answer. Its layout is the same in all versions.
#[derive(serde::Serialize, serde::Deserialize)]
struct Answer {
    magic: [u8; 8],
    version: u16,
    nonce: Nonce,
    proof: Proof,
}

#[derive(serde::Serialize, serde::Deserialize)]
struct Claim {
    host: u64,
    size: u64,
    proof: Proof,
}

#[derive(serde::Serialize, serde::Deserialize)]
enum Verdict {
    Welcome,
    Refused(String),
}

fn mac(secret: &[u8], side: &[u8; 4], nonces: [&Nonce; 2], claim: [u64; 2]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).unwrap_or_else(|_| unreachable!("HMAC takes any key"));
    mac.update(side);
    nonces.iter().for_each(|nonce| mac.update(*nonce));
    claim.iter().for_each(|number| mac.update(&number.to_le_bytes()));
    mac
}

fn proof(mac: Hmac<Sha256>) -> Proof {
    mac.finalize().into_bytes().into()
}

pub(crate) fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// A stream on which all reads and writes together end by a time.
struct Until<'a>(&'a TcpStream, Instant);

impl Until<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.1.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.set_read_timeout(self.left()?)?;
        self.0.read(buffer)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.0.set_write_timeout(self.left()?)?;
        self.0.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A process that may not join.
#[derive(Debug)]
pub(super) enum Not {
    Stranger(String),
    /// It claims to be of this cluster. The others wait for it.
    Member(String),
}

/// `join` gets the number of a process that knows the secret and how many it believes in, and either refuses it or
/// calls its last argument, which welcomes it.
pub(super) fn greet(
    stream: &TcpStream,
    limit: Duration,
    secret: &[u8],
    join: impl FnOnce(usize, usize, &mut dyn FnMut() -> io::Result<()>) -> Result<(), Not>,
) -> Result<usize, Not> {
    let text = |e: io::Error| Not::Stranger(e.to_string());
    let mut stream = Until(stream, Instant::now() + limit);
    let hello: Hello = wire::read(&mut stream, MOST).map_err(text)?;
    fail_if!(hello.magic != MAGIC, Not::Stranger("it speaks something else".to_owned()));
    let nonce = random().map_err(text)?;
    let nonces = [&hello.nonce, &nonce];
    let answer = Answer { magic: MAGIC, version: VERSION, nonce, proof: proof(mac(secret, b"hub ", nonces, [0; 2])) };
    wire::write(&mut stream, &answer).map_err(text)?;
    let versions = format!("it speaks version {} of the protocol, rank 0 version {VERSION}", hello.version);
    let claim: Claim = wire::read(&mut stream, MOST).map_err(|e| match hello.version {
        VERSION => text(e),
        _ => Not::Stranger(versions.clone()),
    })?;
    // Compared in constant time.
    let proved = mac(secret, b"host", nonces, [claim.host, claim.size]).verify_slice(&claim.proof).is_ok();
    let named = |why: &str| Not::Member(format!("rank {}: {why}", claim.host));
    let (host, size) = (usize::try_from(claim.host), usize::try_from(claim.size));
    let verdict = match (proved, host, size) {
        (false, ..) => Err(named("the secrets differ (GPU_POOL_SECRET)")),
        _ if hello.version != VERSION => Err(named(&versions)),
        (true, Ok(host), Ok(size)) => {
            join(host, size, &mut || wire::write(&mut stream, &Verdict::Welcome)).map(|()| host)
        }
        (true, ..) => Err(Not::Stranger("a rank that is no number".to_owned())),
    };
    if let Err(Not::Stranger(why) | Not::Member(why)) = &verdict {
        wire::write(&mut stream, &Verdict::Refused(wire::cut(why.clone()))).map_err(text)?;
    }
    verdict
}

pub(super) fn introduce(stream: &TcpStream, secret: &[u8], host: usize, size: usize, until: Instant) -> io::Result<()> {
    let address = stream.peer_addr().map_or_else(|_| "rank 0".to_owned(), |address| address.to_string());
    let refused = |why: String| Err(io::Error::new(ErrorKind::PermissionDenied, why));
    let mut stream = Until(stream, until);
    let nonce = random()?;
    wire::write(&mut stream, &Hello { magic: MAGIC, version: VERSION, nonce })?;
    let answer: Answer = wire::read(&mut stream, MOST)?;
    if answer.magic != MAGIC {
        return refused(format!("{address} speaks something else"));
    }
    let nonces = [&nonce, &answer.nonce];
    let claim = [host as u64, size as u64];
    let knows = mac(secret, b"hub ", nonces, [0; 2]).verify_slice(&answer.proof).is_ok();
    // Nothing is proved to who does not know the secret; the claim tells rank 0 who will not come.
    let proof = if knows { proof(mac(secret, b"host", nonces, claim)) } else { Proof::default() };
    let claimed = wire::write(&mut stream, &Claim { host: claim[0], size: claim[1], proof });
    if answer.version != VERSION {
        return refused(format!(
            "rank 0 speaks version {} of the protocol, rank {host} version {VERSION}: run the same program everywhere",
            answer.version
        ));
    }
    if !knows {
        return refused(format!("{address} does not know this process's secret (GPU_POOL_SECRET)"));
    }
    claimed?;
    match wire::read(&mut stream, 2 * wire::MOST_TEXT)? {
        Verdict::Welcome => Ok(()),
        Verdict::Refused(why) => refused(format!("rank 0 refused rank {host}: {why}")),
    }
}

#[cfg(test)]
#[path = "../tests/unit/greet_tests.rs"]
mod tests;
