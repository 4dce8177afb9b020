#include "libcrypto.h"

#include <dlfcn.h>

#include <memory>
#include <stdexcept>

#include "errors.h"

namespace ms {
namespace {

constexpr int X25519 = 1034;  // NID_X25519
// Python's own hashlib has usually loaded one of them already, which dlopen() then finds by name.
constexpr const char* FILES[] = {"libcrypto.so.3", "libcrypto.so.4", "libcrypto.so.1.1"};

template <class Function>
void load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw NoCrypto(std::string("OpenSSL's libcrypto has no ") + name + ": 1.1.1 or newer is needed");
}

using Owned = std::unique_ptr<void, void (*)(void*)>;

Owned checked(void* made, void (*free)(void*)) {
  if (!made) throw std::invalid_argument("this is no X25519 key");
  return Owned(made, free);
}

const uint8_t* bytes_of(const std::string& text) { return reinterpret_cast<const uint8_t*>(text.data()); }

}  // namespace

LibCrypto::LibCrypto() {
  void* library = nullptr;
  for (const char* file : FILES)
    if (!library) library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (!library) throw NoCrypto("encryption needs OpenSSL's libcrypto (libcrypto.so.3), which is not installed");
#define LOAD(name) load(library, #name, name)
  LOAD(EVP_aes_256_gcm);
  LOAD(EVP_CIPHER_CTX_new);
  LOAD(EVP_CIPHER_CTX_free);
  LOAD(EVP_CipherInit_ex);
  LOAD(EVP_CipherUpdate);
  LOAD(EVP_CipherFinal_ex);
  LOAD(EVP_CIPHER_CTX_ctrl);
  LOAD(EVP_sha256);
  LOAD(HMAC);
  LOAD(OPENSSL_cleanse);
  LOAD(EVP_PKEY_new_raw_private_key);
  LOAD(EVP_PKEY_new_raw_public_key);
  LOAD(EVP_PKEY_get_raw_public_key);
  LOAD(EVP_PKEY_free);
  LOAD(EVP_PKEY_CTX_new);
  LOAD(EVP_PKEY_CTX_free);
  LOAD(EVP_PKEY_derive_init);
  LOAD(EVP_PKEY_derive_set_peer);
  LOAD(EVP_PKEY_derive);
#undef LOAD
}

const LibCrypto& LibCrypto::get() {
  static const LibCrypto loaded;  // a constructor that throws runs again on the next call
  return loaded;
}

std::string x25519_public(const std::string& private_key) {
  const LibCrypto& lib = LibCrypto::get();
  const Owned key = checked(
      lib.EVP_PKEY_new_raw_private_key(X25519, nullptr, bytes_of(private_key), private_key.size()), lib.EVP_PKEY_free);
  std::string out(X25519_BYTES, '\0');
  size_t size = out.size();
  if (lib.EVP_PKEY_get_raw_public_key(key.get(), reinterpret_cast<uint8_t*>(out.data()), &size) != 1)
    throw std::invalid_argument("this X25519 key has no public one");
  return out;
}

std::string x25519_shared(const std::string& private_key, const std::string& public_key) {
  const LibCrypto& lib = LibCrypto::get();
  const Owned ours = checked(
      lib.EVP_PKEY_new_raw_private_key(X25519, nullptr, bytes_of(private_key), private_key.size()), lib.EVP_PKEY_free);
  const Owned theirs = checked(
      lib.EVP_PKEY_new_raw_public_key(X25519, nullptr, bytes_of(public_key), public_key.size()), lib.EVP_PKEY_free);
  const Owned context = checked(lib.EVP_PKEY_CTX_new(ours.get(), nullptr), lib.EVP_PKEY_CTX_free);
  std::string out(X25519_BYTES, '\0');
  size_t size = out.size();
  // It also refuses points that give zeros, whatever our key is.
  if (lib.EVP_PKEY_derive_init(context.get()) != 1 || lib.EVP_PKEY_derive_set_peer(context.get(), theirs.get()) != 1 ||
      lib.EVP_PKEY_derive(context.get(), reinterpret_cast<uint8_t*>(out.data()), &size) != 1 || size != X25519_BYTES)
    throw std::invalid_argument("this public key is no X25519 key");
  return out;
}

}  // namespace ms
